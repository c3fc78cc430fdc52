"""AdamW in one pass, against torch's."""

from __future__ import annotations

import copy

import pytest
import torch

from fw.kernels import adamw
from fw_plugins.optimizer.adamw import AdamWUpdate

HOW = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

pytestmark = pytest.mark.skipif(not adamw.available(), reason="there is no compiler, and torch's update is used")


def weights(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 7), (64, 48), (3,), (), (1 << 14, 3)]
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    made.append(torch.randn(6, 9, generator=generator).to(dtype).t())  # dense, and not contiguous
    return [torch.nn.Parameter(each) for each in made]


def give_gradients(parameters, step):
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape, generator=generator))


def test_updates_are_those_of_torch():
    ours, theirs = weights(), weights()
    made = AdamWUpdate(ours, **HOW, fused=True), torch.optim.AdamW(theirs, **HOW)
    for step in range(20):
        for parameters, optimizer in zip((ours, theirs), made, strict=True):
            give_gradients(parameters, step)
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-5)
        for key in ("step", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(made[0].state[mine][key], made[1].state[other][key], atol=1e-6, rtol=1e-5)


def test_a_factor_is_that_of_gradients_and_of_one_step_alone():
    ours, theirs = weights(), weights()
    made = AdamWUpdate(ours, **HOW, fused=True), AdamWUpdate(theirs, **HOW, fused=True)
    for step in range(4):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        if step != 2:
            made[0].grad_factor = torch.tensor(0.25)
            torch._foreach_mul_([p.grad for p in theirs], 0.25)
        for optimizer in made:
            optimizer.step()
        assert made[0].grad_factor is None
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


def test_in_bfloat16_all_is_computed_in_fp32_and_rounded_once():
    ours, theirs = weights(torch.bfloat16), [torch.nn.Parameter(p.detach().float()) for p in weights(torch.bfloat16)]
    made = AdamWUpdate(ours, **HOW, fused=True), torch.optim.AdamW(theirs, **HOW)
    give_gradients(ours, 0)
    for mine, other in zip(ours, theirs, strict=True):
        other.grad = mine.grad.float()
    for optimizer in made:
        optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other.bfloat16(), atol=1e-8, rtol=2**-7)
        assert (mine == other.bfloat16()).float().mean() > 0.99 or mine.numel() < 100
        assert made[0].state[mine]["exp_avg"].dtype == torch.bfloat16


@pytest.mark.parametrize("other", [{"amsgrad": True}, {"maximize": True}, {"dtype": torch.float64}])
def test_what_the_kernel_does_not_take_torch_updates(other):
    dtype, options = other.get("dtype", torch.float32), {key: value for key, value in other.items() if key != "dtype"}
    ours, theirs = (torch.nn.Parameter(torch.ones(4, 6, dtype=dtype)) for _ in range(2))
    made = AdamWUpdate([ours], **HOW, **options, fused=True), torch.optim.AdamW([theirs], **HOW, **options)
    made[0].grad_factor = torch.tensor(0.5)
    ours.grad, theirs.grad = torch.full_like(ours, 2.0), torch.full_like(theirs, 1.0)
    for optimizer in made:
        optimizer.step()
    torch.testing.assert_close(ours, theirs)


def test_state_is_torchs_own():
    ours, theirs = weights(), weights()
    made = AdamWUpdate(ours, **HOW, fused=True), torch.optim.AdamW(theirs, **HOW, fused=True)
    give_gradients(ours, 0)
    made[0].step()
    made[1].load_state_dict(copy.deepcopy(made[0].state_dict()))
    for mine, other in zip(ours, theirs, strict=True):
        other.data.copy_(mine)
    for parameters, optimizer in zip((ours, theirs), made, strict=True):
        give_gradients(parameters, 1)
        optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-5)


def test_parameters_without_gradients_stay():
    kept, changed = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = AdamWUpdate([kept, changed], **HOW, fused=True)
    changed.grad = torch.ones(3)
    optimizer.step()
    assert (kept == 1).all() and (changed != 1).all() and not optimizer.state[kept]
