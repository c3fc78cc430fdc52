"""Gradients that stay in bf16 until the update, against autocast's own, which are widened before it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from conftest import column
from fw.cli import main
from fw.config import load
from fw.kernels import adamw
from fw.planning.plan import plan
from fw.recipe import resolve
from fw_plugins.optimizer.adamw import AdamWUpdate
from fw_plugins.sharding import narrow
from fw_plugins.sharding.narrow import NarrowLinear

pytestmark = pytest.mark.skipif(not adamw.available(), reason="there is no compiler, and gradients are widened for torch's update")


def gradients(kind: type[nn.Linear], uses: int = 1, again: bool = False, bias: bool = True) -> list[torch.Tensor]:
    """Of the input, the weight and the bias."""
    torch.manual_seed(0)
    layer = nn.Linear(48, 24, bias=bias)
    layer.__class__ = kind
    x_BLI = torch.randn(2, 5, 48, requires_grad=True)
    if isinstance(layer, NarrowLinear):
        layer.begin()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        found = [checkpoint(layer, x_BLI * n, use_reentrant=False) if again else layer(x_BLI * n) for n in range(1, uses + 1)]
    torch.stack([(y.float() ** 2).sum() for y in found]).sum().backward()
    return [x_BLI.grad, layer.weight.grad, *([layer.bias.grad] if bias else [])]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_gradient_is_autocasts_in_half_of_the_bytes(again: bool, bias: bool) -> None:
    ours, theirs = gradients(NarrowLinear, again=again, bias=bias), gradients(nn.Linear, again=again, bias=bias)
    assert [grad.dtype for grad in ours[1:]] == [torch.bfloat16, *([torch.float32] if bias else [])]
    for own, expected in zip(ours, theirs, strict=True):
        assert torch.equal(own.to(expected.dtype), expected)


@pytest.mark.parametrize("again", [False, True])
def test_what_is_used_twice_is_added_up_in_the_weights_own_dtype(again: bool) -> None:
    ours, theirs = gradients(NarrowLinear, uses=2, again=again), gradients(nn.Linear, uses=2, again=again)
    assert ours[1].dtype == torch.float32
    for own, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-6)


class _Block(nn.Module):
    """Two layers, one of which it may use twice; beside them what is none."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 40, bias=False), nn.Linear(40, 24)
        self.norm, self.twice = nn.RMSNorm(24), twice

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        hidden_TH = torch.nn.functional.silu(self.up(self.norm(x_TD)))
        return x_TD + self.down(hidden_TH) + (self.down(hidden_TH * 2) if self.twice else 0)


def of_block(kept: str, backend: str, again: bool, twice: bool, calls: int = 1) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    torch.compiler.reset()
    block = _Block(twice)
    block.compile(backend=backend)
    model = SimpleNamespace(blocks=[block])
    if kept == "narrow":
        narrow.narrow(model)
        block._compiled_call_impl.begin()
    x_TD = torch.randn(7, 24, requires_grad=True)
    y_TD = x_TD
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        for _ in range(calls):
            y_TD = checkpoint(block, y_TD, use_reentrant=False) if again else block(y_TD)
    (y_TD.float() ** 2).sum().backward()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert block(x_TD).shape == x_TD.shape
    assert "weight" not in block.up.__dict__ and sum(1 for _ in block.parameters()) == 4
    return {"x": x_TD.grad, **{name: p.grad for name, p in block.named_parameters()}}


@pytest.mark.parametrize(
    ("backend", "again", "twice"),
    [
        ("inductor", False, False),
        *((name, *case) for name in ("eager", "aot_eager") for case in ((False, False), (True, False), (False, True))),
    ],
)
def test_gradients_of_compiled_blocks_are_autocasts_in_half_of_the_bytes(backend: str, again: bool, twice: bool) -> None:
    """A layer that is used twice within one call has the graph's sum, which is in 16 bits."""
    ours, theirs = (of_block(kept, backend, again, twice) for kept in ("narrow", "wide"))
    assert {name for name, grad in ours.items() if grad.dtype == torch.bfloat16} == {"up.weight", "down.weight"}
    for name, grad in ours.items():
        if twice:
            torch.testing.assert_close(grad.float(), theirs[name], rtol=0.02, atol=0.02)
        else:
            assert torch.equal(grad.float(), theirs[name]), name


def test_a_compiled_block_that_is_called_twice_adds_up_in_the_weights_own_dtype() -> None:
    ours, theirs = (of_block(kept, "aot_eager", False, False, calls=2) for kept in ("narrow", "wide"))
    assert all(grad.dtype == torch.float32 for grad in ours.values())
    for name, grad in ours.items():
        torch.testing.assert_close(grad, theirs[name], rtol=1e-6, atol=1e-6)


def test_gradients_of_gradients() -> None:
    found = []
    for kind in (NarrowLinear, nn.Linear):
        torch.manual_seed(0)
        layer = nn.Linear(8, 4)
        layer.__class__ = kind
        x_TI = torch.randn(3, 8, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            y = layer(x_TI).float()
        (grad,) = torch.autograd.grad((y**3).sum(), x_TI, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), layer.weight)[0].float())
    torch.testing.assert_close(*found, rtol=0.05, atol=0.05 * float(found[1].abs().max()))


def test_outside_of_autocast_and_without_gradients_it_is_a_linear_layer() -> None:
    layer = nn.Linear(8, 4)
    plain = layer(torch.ones(2, 8))
    layer.__class__ = NarrowLinear
    layer.begin()
    assert torch.equal(layer(torch.ones(2, 8)), plain)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        layer(torch.ones(2, 8))
    assert layer.uses.count == 0


@pytest.mark.parametrize("by_kernel", [True, False])
def test_an_update_widens_as_it_reads(monkeypatch: pytest.MonkeyPatch, by_kernel: bool) -> None:
    """By the kernel, and where torch's update takes what that does not."""
    if not by_kernel:
        monkeypatch.setattr(adamw, "takes", lambda *alike: False)
    made = []
    for dtype in (torch.bfloat16, torch.float32):
        generator = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.randn(size, generator=generator)) for size in (37, 64)]
        optimizer = AdamWUpdate(parameters, lr=0.1, weight_decay=0.1, fused=True)
        for _ in range(3):
            for p in parameters:
                p.grad_dtype = dtype
                p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(dtype)
            optimizer.grad_factor = torch.tensor(0.37)
            optimizer.step()
            optimizer.zero_grad()
        made.append([*parameters, *(value for p in parameters for value in optimizer.state[p].values())])
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))


ONE = ["precision=bf16", "train.micro_batch_size=8", "train.max_steps=6"]


def test_a_run_is_the_same_in_fewer_bytes(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _check_run(monkeypatch)


def test_a_compiled_run_is_the_same_in_fewer_bytes(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _check_run(monkeypatch, "train.compile=true")


def _check_run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    for name, fits in (("narrow", narrow.fits), ("wide", lambda spec: False)):
        monkeypatch.setattr(narrow, "fits", fits)
        assert main(["train", "tiny.yaml", *ONE, *words, f"train.run_dir={name}"]) == 0
    assert column("narrow", "loss") == column("wide", "loss")
    assert column("narrow", "grad_norm") == pytest.approx(column("wide", "grad_norm"), rel=1e-12)


@pytest.mark.parametrize("words", [[], ["train.compile=true"]])
def test_a_plan_knows(workspace: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    def gradients_of() -> int:
        document = plan("tiny.yaml", *ONE, *words)
        return document.per_rank[0].most["gradients"]

    narrow_bytes = gradients_of()
    monkeypatch.setattr(narrow, "fits", lambda spec: False)
    layers = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)
    assert gradients_of() - narrow_bytes == 2 * layers


@pytest.mark.parametrize(
    "words, kept",
    [
        ([], True),
        (["train.micro_batch_size=4"], False),
        (["precision=fp32"], False),
        (["precision={name: bf16, accumulate: bf16}"], False),
        (["optimizer=sgd"], False),
        (["optimizer.in_backward=true"], False),
        (["offload={optimizer: cpu}"], False),
        (["precision={name: phased, phases: [{from_step: 0, compute: bf16}, {from_step: 5, compute: fp32}]}"], False),
    ],
)
def test_where(workspace: Path, words: list[str], kept: bool) -> None:
    recipe = resolve(load("tiny.yaml", [*ONE, *words]))
    assert narrow.fits(recipe.step_spec(torch.device("cpu"))) == kept
