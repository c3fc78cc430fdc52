"""Optimizers that torch does not have, against other implementations and the papers' formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fw.errors import UserError
from fw_plugins.optimizer.adamw_bf16 import AdamWBF16Update, write
from fw_plugins.optimizer.lion import Lion, LionConfig, LionUpdate
from plugins.test_stepper import batches, loss_of, model


def gradients(steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(5, 7, generator=generator) for _ in range(steps)]


def test_lion_is_the_papers_formula():
    start = torch.linspace(-1, 1, 35).view(5, 7)
    weight = torch.nn.Parameter(start.clone())
    optimizer = LionUpdate([weight], lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    w, m = start.numpy().astype(np.float64), np.zeros((5, 7))
    for grad in gradients(6):
        weight.grad = grad.clone()
        optimizer.step()
        g = grad.numpy().astype(np.float64)
        w = w - 0.1 * (np.sign(0.9 * m + 0.1 * g) + 0.5 * w)
        m = 0.99 * m + 0.01 * g
    np.testing.assert_allclose(weight.detach().numpy(), w, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(optimizer.state[weight]["exp_avg"].numpy(), m, rtol=1e-4, atol=1e-6)


def test_lion_is_that_of_bitsandbytes():
    theirs = pytest.importorskip("bitsandbytes").optim.Lion
    made = []
    for cls in (LionUpdate, theirs):
        torch.manual_seed(0)
        net = model()
        optimizer = cls(net.parameters(), lr=1e-3, betas=(0.95, 0.98), weight_decay=0.1)
        for ids in batches(5):
            loss_of(net, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
        made.append(net)
    for (name, a), b in zip(made[0].named_parameters(), made[1].parameters(), strict=True):
        # A sign is all or nothing: where a sum is nought but for rounding, the two may differ by two steps.
        assert ((a - b).abs() > 1e-5).float().mean() < 1e-3, name


def test_rounding_is_right_on_average_and_never_further_than_a_neighbour():
    generator = torch.Generator().manual_seed(0)
    values = torch.cat([torch.randn(50), torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-20, 3e38])])
    rounded = []
    for _ in range(4000):
        target = torch.empty(len(values), dtype=torch.bfloat16)
        write(target, values, generator)
        rounded.append(target.float())
    found = torch.stack(rounded)
    unit = torch.finfo(torch.bfloat16).eps * values.abs()
    assert ((found - values).abs() <= unit).all()
    assert ((found.double().mean(0) - values).abs() <= 0.05 * unit + 1e-45).all()
    exact = values.bfloat16().float() == values
    assert (found[:, exact] == values[exact]).all() and exact.sum() >= 4
    special = torch.tensor([float("inf"), float("-inf"), float("nan")])
    target = torch.empty(3, dtype=torch.bfloat16)
    write(target, special, generator)
    assert torch.equal(target.isnan(), special.isnan()) and torch.equal(target[:2].float(), special[:2])


def test_adamw_in_bf16_follows_adamw():
    start = torch.linspace(-1, 1, 35).view(5, 7)
    arguments = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    made = AdamWBF16Update([ours], **arguments), torch.optim.AdamW([theirs], **arguments)
    for grad in gradients(30):
        for weight, optimizer in zip((ours, theirs), made, strict=True):
            weight.grad = grad.clone()
            optimizer.step()
    assert {key: value.dtype for key, value in made[0].state[ours].items()} == {
        "step": torch.float32,
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
    }
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() < 0.03 * moved


def test_small_updates_of_bf16_weights_are_not_lost():
    """Steps of 1e-4 from 1.0, where the next bfloat16 below is 0.0039 away: to the nearest nothing would ever move."""
    weight = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = AdamWBF16Update([weight], lr=1e-4)
    plain = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    nearest = torch.optim.AdamW([plain], lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        weight.grad, plain.grad = torch.ones_like(weight), torch.ones_like(plain)
        optimizer.step()
        nearest.step()
    assert (plain == 1).all()
    assert weight.float().mean().item() == pytest.approx(0.99, abs=3e-4)


def test_what_makes_no_sense_is_refused():
    for options in ({"betas": [0.9]}, {"betas": [0.9, 1.0]}, {"lr": -1.0}):
        with pytest.raises(UserError, match="optimizer"):
            LionConfig(**options)
    assert Lion(LionConfig()).spec(torch.device("cpu")).cls is LionUpdate
