"""Optimizers that torch does not have, against other implementations and the papers' formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fw.errors import UserError
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


def test_what_makes_no_sense_is_refused():
    for options in ({"betas": [0.9]}, {"betas": [0.9, 1.0]}, {"lr": -1.0}):
        with pytest.raises(UserError, match="optimizer"):
            LionConfig(**options)
    assert Lion(LionConfig()).spec(torch.device("cpu")).cls is LionUpdate
