"""Optimizers that torch does not have, against other implementations and the papers' formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fw.errors import UserError
from fw_plugins.optimizer.adafactor import AdafactorUpdate
from fw_plugins.optimizer.adamw_8bit import AdamW8bitUpdate
from fw_plugins.optimizer.adamw_bf16 import AdamWBF16Update, write
from fw_plugins.optimizer.eight_bit import dequantize, numbers, quantize
from fw_plugins.optimizer.lamb import LambUpdate
from fw_plugins.optimizer.lion import Lion, LionConfig, LionUpdate
from fw_plugins.optimizer.lion_8bit import Lion8bitUpdate
from fw_plugins.optimizer.muon import MuonUpdate, orthogonalized
from fw_plugins.sharding.torch_stepper import parameter_groups
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


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("block", [64, 256])
def test_codes_are_those_of_bitsandbytes(signed, block):
    functional = pytest.importorskip("bitsandbytes").functional
    table = functional.create_dynamic_map(signed)
    torch.testing.assert_close(torch.tensor(numbers(signed)), table, atol=1e-8, rtol=1e-6)
    values = torch.randn(32, 512, generator=torch.Generator().manual_seed(0)) ** 3
    values = values if signed else values.abs()
    codes, scales = quantize(values, block, signed)
    theirs, state = functional.quantize_blockwise(values, code=table, blocksize=block)
    torch.testing.assert_close(scales.flatten(), state.absmax)
    back = dequantize(codes, scales, signed)
    torch.testing.assert_close(back, functional.dequantize_blockwise(codes, state).view(32, 512), atol=1e-6, rtol=1e-5)
    # Its kernel for CPUs looks the code up in a table, and takes a neighbour of the nearest for some small values.
    other = functional.dequantize_blockwise(theirs, state).view(32, 512)
    assert ((back - values).abs() <= (other - values).abs() + 1e-6).all()
    assert (codes == theirs).float().mean() > 0.85
    nothing = dequantize(*quantize(torch.zeros(2, 256), block, signed), signed)
    assert (nothing == 0).all()


@pytest.mark.parametrize(("ours", "name"), [(AdamW8bitUpdate, "AdamW8bit"), (Lion8bitUpdate, "Lion8bit")])
def test_8bit_updates_are_those_of_bitsandbytes(ours, name):
    start = torch.linspace(-1, 1, 64 * 256).view(64, 256)
    arguments = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
    mine, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    made = ours([mine], **arguments), getattr(pytest.importorskip("bitsandbytes").optim, name)([theirs], **arguments)
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        grad = torch.randn(64, 256, generator=generator)
        for weight, optimizer in zip((mine, theirs), made, strict=True):
            weight.grad = grad.clone()
            optimizer.step()
    moved = (theirs - start).abs().mean()
    assert (mine - theirs).abs().mean() < 1e-2 * moved
    state, other = made[0].state[mine], made[1].state[theirs]
    assert state["exp_avg"].dtype == torch.uint8 and (state["exp_avg"] != other["state1"]).float().mean() < 0.02


def test_8bit_state_is_a_quarter():
    net = torch.nn.Sequential(torch.nn.Embedding(1000, 256), torch.nn.Linear(256, 1024, bias=False), torch.nn.RMSNorm(1024))
    optimizer = AdamW8bitUpdate(net.parameters())
    optimizer.begin()
    kept = sum(t.nbytes for state in optimizer.state.values() for t in state.values())
    assert kept <= 0.27 * 8 * sum(p.numel() for p in net.parameters())


def test_adafactor_is_that_of_torch():
    made = []
    for cls, arguments in ((AdafactorUpdate, {"eps": 1e-3}), (torch.optim.Adafactor, {"eps": (None, 1e-3)})):
        torch.manual_seed(0)
        net = model()
        optimizer = cls(net.parameters(), lr=0.02, weight_decay=0.1, **arguments)
        for ids in batches(5):
            loss_of(net, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
        made.append(net)
    for (name, a), b in zip(made[0].named_parameters(), made[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_lamb_is_the_papers_formula(decay):
    start = torch.linspace(-1, 1, 35).view(5, 7)
    weight = torch.nn.Parameter(start.clone())
    optimizer = LambUpdate([weight], lr=0.1, betas=(0.9, 0.99), eps=1e-6, weight_decay=decay)
    w, m, v = start.numpy().astype(np.float64), np.zeros((5, 7)), np.zeros((5, 7))
    for step, grad in enumerate(gradients(6), 1):
        weight.grad = grad.clone()
        optimizer.step()
        g = grad.numpy().astype(np.float64)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        u = m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.99**step)) + 1e-6) + decay * w
        w = w - 0.1 * (np.linalg.norm(w) / np.linalg.norm(u) if decay else 1.0) * u
    np.testing.assert_allclose(weight.detach().numpy(), w, rtol=1e-4, atol=1e-6)


def test_muon_is_that_of_torch():
    made = []
    for ours in (True, False):
        net = model()
        matrices = {p for block in net.blocks for p in block.parameters() if p.dim() >= 2}
        groups = parameter_groups(net.named_parameters(), net.undecayed(), 0.1, matrices)
        if ours:
            optimizers = [MuonUpdate(groups, lr=0.01, betas=(0.9, 0.95))]
        else:
            rest = [{k: v for k, v in group.items() if k != "matrix"} for group in groups[1:]]
            optimizers = [
                torch.optim.Muon(groups[0]["params"], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
                torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.95)),
            ]
        for ids in batches(2):
            loss_of(net, ids).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        made.append(net)
    start = model()
    for (name, a), b, s in zip(made[0].named_parameters(), made[1].parameters(), start.parameters(), strict=True):
        # What bfloat16 rounds away of small singular values, five iterations make much of.
        assert (a - b).norm() <= 0.02 * (b - s).norm(), name


def test_orthogonalized_matrices_have_singular_values_near_one():
    found = torch.linalg.svdvals(orthogonalized(torch.randn(3, 48, 32, generator=torch.Generator().manual_seed(0)), 5).float())
    assert found.shape == (3, 32) and found.min() > 0.5 and found.max() < 1.3


def test_what_makes_no_sense_is_refused():
    for options in ({"betas": [0.9]}, {"betas": [0.9, 1.0]}, {"lr": -1.0}):
        with pytest.raises(UserError, match="optimizer"):
            LionConfig(**options)
    assert Lion(LionConfig()).spec(torch.device("cpu")).cls is LionUpdate
