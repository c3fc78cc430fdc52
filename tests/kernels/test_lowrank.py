"""Changes of low rank beside a frozen weight, by AMX, against the formula in fp64 and torch's operators."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from fw.kernels import lowrank
from fw.kernels.build import with_threads
from fw_plugins.peft.lora_layers import LoraLinear, add_to_linear
from kernels.flags import with_tiles

SHAPES = [(70, 64, 100, 16), (33, 50, 34, 40), (1, 64, 64, 4), (200, 320, 96, 1)]
"""Tokens, features in and out, rank."""


@pytest.fixture(autouse=True)
def tiles(monkeypatch):
    with_tiles(monkeypatch, lowrank, "_FORWARD", "_BACKWARD")


def factors(tokens, inner, outer, rank, *, dtype=torch.float32, wants_x=True):
    generator = torch.Generator().manual_seed(tokens + rank)
    x = torch.randn(2, tokens, inner, generator=generator).bfloat16().requires_grad_(wants_x)
    weight = (torch.randn(outer, inner, generator=generator) / inner**0.5).bfloat16()
    a = (torch.randn(rank, inner, generator=generator) / inner**0.5).to(dtype).requires_grad_()
    b = torch.randn(outer, rank, generator=generator).to(dtype).requires_grad_()
    return x, weight, a, b, torch.randn(2, tokens, outer, generator=generator).bfloat16()


def exact(x, weight, a, b, grad, scale):
    x, a, b = (each.detach().bfloat16().double().requires_grad_() for each in (x, a, b))
    y = F.linear(x, weight.double()) + scale * F.linear(F.linear(x, a), b)
    y.backward(grad.double())
    return y, x.grad, a.grad, b.grad


def off(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("wants_x", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_right_to_bfloat16(shape, dtype, wants_x):
    x, weight, a, b, grad = factors(*shape, dtype=dtype, wants_x=wants_x)
    y_exact, dx, da, db = exact(x, weight, a, b, grad, 0.5)
    found = []
    for compute in (
        lambda: lowrank.changed(x, weight, None, a, b, 0.5),
        lambda: lowrank.added(F.linear(x, weight) * 1, x, a, b, 0.5),
    ):
        x.grad = a.grad = b.grad = None
        assert lowrank.takes(x, a, b, weight)
        y = compute()
        y.backward(grad)
        assert y.dtype == torch.bfloat16 and a.grad.dtype == b.grad.dtype == dtype
        errors = [off(y, y_exact), off(a.grad, da), off(b.grad, db), *([off(x.grad, dx)] if wants_x else [])]
        assert max(errors) < 5e-3, errors
        found.append((y, a.grad, b.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_numbers_of_threads_do_not_show():
    found = []
    for threads in (1, 2, 7):
        x, weight, a, b, grad = factors(300, 200, 400, 24)
        with with_threads(threads):
            lowrank.changed(x, weight, None, a, b, 2.0).backward(grad)
        found.append((x.grad, a.grad, b.grad))
    assert all(torch.equal(found[0][i], each[i]) for each in found[1:] for i in range(3))


def test_gradients_can_be_differentiated_again():
    """A penalty on the gradient of what goes in, as of the formula in fp32."""
    x, weight, a, b, grad = factors(12, 32, 32, 4)
    told = []
    for compute in (
        lambda x, a, b: lowrank.changed(x, weight, None, a, b, 0.5),
        lambda x, a, b: lowrank.added(F.linear(x, weight) * 1, x, a, b, 0.5),
        lambda x, a, b: F.linear(x.float(), weight.float()) + 0.5 * F.linear(F.linear(x.float(), a), b),
    ):
        y = compute(x, a, b)
        (dx,) = torch.autograd.grad(y, x, grad.to(y.dtype), create_graph=True)
        told.append(torch.autograd.grad(dx.float().square().sum(), (a, b)))
    for mine in told[:2]:
        for one, other in zip(mine, told[2], strict=True):
            assert off(one, other.double()) < 2e-2


class Rounded(torch.nn.Linear):
    """One whose product is an operation of its own, as of layers that keep codes."""

    def forward(self, x):
        return Product.apply(x.bfloat16(), self.weight)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return F.linear(x, weight.sign().to(x.dtype))

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        return grad @ weight.sign().to(grad.dtype), None


@pytest.mark.parametrize("case", ["plain", "bias", "coded", "fp32 weight", "dropout", "evaluation"])
def test_layers_are_what_they_are_without_kernels(case, monkeypatch):
    layer = torch.nn.Linear(64, 96, bias=case == "bias").requires_grad_(False)
    if case == "coded":
        layer.__class__ = Rounded
    add_to_linear(layer, 8, 2.0, 0.5 if case == "dropout" else 0.0)
    assert isinstance(layer, LoraLinear)
    torch.nn.init.normal_(layer.lora_A, std=0.1)
    torch.nn.init.normal_(layer.lora_B, std=0.1)
    if case != "fp32 weight":
        layer.weight.data = layer.weight.data.bfloat16()
    called = []
    for name in ("changed", "added"):
        kernel = getattr(lowrank, name)
        monkeypatch.setattr(lowrank, name, lambda *given, kernel=kernel, name=name: called.append(name) or kernel(*given))
    x, told = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0)), []
    for off_by in ("", "off"):
        monkeypatch.setenv("FW_TRAINING_KERNELS", off_by)
        torch.manual_seed(0)
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(case != "evaluation"):
            y = layer(x)
        if case != "evaluation":
            y.float().square().sum().backward()
        told.append([y.detach(), *(p.grad for p in (layer.lora_A, layer.lora_B) if p.grad is not None)])
    assert called == {"coded": ["added"], "dropout": [], "evaluation": []}.get(case, ["changed"])
    assert len(told[0]) == (1 if case == "evaluation" else 3)
    for mine, other in zip(*told, strict=True):
        assert mine.dtype == other.dtype and off(mine, other.double()) < 1e-2


def test_compiled_layers_compute_the_same():
    layers = [torch.nn.Linear(64, 96, bias=False), torch.nn.Linear(96, 64)]
    for layer in layers:
        layer.requires_grad_(False).bfloat16()
        add_to_linear(layer, 8, 2.0, 0.0)
        torch.nn.init.normal_(layer.lora_A, std=0.1)
        torch.nn.init.normal_(layer.lora_B, std=0.1)
    model = torch.nn.Sequential(layers[0], torch.nn.SiLU(), layers[1])
    x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    told = []
    for compute in (model, torch.compile(model, fullgraph=True)):
        x.grad = None
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            y = compute(x)
        y.float().square().sum().backward()
        told.append([y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(told[0]) == 6
    for mine, other in zip(*told, strict=True):
        assert off(mine, other.double()) < 1e-2


def test_operations_are_counted():
    x, weight, a, b, grad = factors(8, 32, 64, 4)
    with FlopCounterMode(display=False) as counted:
        lowrank.changed(x, weight, None, a, b, 1.0).backward(grad)
    tokens = 16
    assert counted.get_total_flops() == 2 * tokens * (2 * 32 * 64 + 3 * 4 * (32 + 64))
