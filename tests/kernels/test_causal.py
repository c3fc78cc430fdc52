"""Causal attention with gradients against scores written out in float64."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fw.kernels import causal
from fw.kernels.build import with_threads
from fw.kinds.attention import Pattern
from fw.meter.allocations import allocations
from fw_plugins.attention.sdpa import SDPAttention

CPU = torch.device("cpu")
SHAPES = {
    "whole tiles": (2, 4, 2, 128, 32),
    "one position": (1, 2, 2, 1, 16),
    "a tile and a bit": (2, 4, 1, 77, 64),
    "several chunks": (1, 2, 1, 1100, 48),
    "wide heads": (1, 6, 2, 131, 128),
    "heads of no whole panel": (1, 2, 2, 200, 80),
}
PATTERNS = {
    "order": {},
    "capped": {"softcap": 3.0},
    "window": {"window": 17},
    "window of tiles": {"window": 128},
    "documents": {"documents": True},
    "all": {"softcap": 2.0, "window": 70, "documents": True},
}
pytestmark = pytest.mark.skipif(not causal._FORWARD.available, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def kernels_train(monkeypatch):
    monkeypatch.setenv("FW_TRAINING_KERNELS", "on")


def drawn(shape, dtype):
    batch, heads, kv_heads, length, size = shape
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, length, n, size, generator=draw).to(dtype).transpose(1, 2) for n in (heads, kv_heads, kv_heads))
    documents = torch.randint(0, 4, (batch, length), generator=draw).sort(1)[0]
    grad = torch.randn(batch, heads, length, size, generator=draw).to(dtype)
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_()], documents, grad


def by_hand(q, k, v, scale, softcap, window, documents):
    group, length = q.shape[1] // k.shape[1], q.shape[2]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = scale * q @ k.transpose(-1, -2)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    behind = torch.arange(length)[:, None] - torch.arange(length)
    seen = (behind >= 0)[None, None]
    seen = seen & (behind < window) if window else seen
    seen = seen & (documents[:, None, :, None] == documents[:, None, None, :]) if documents is not None else seen
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("threads", [1, 3], ids=["by heads", "by keys and by queries"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_scores_written_out(shape, pattern, dtype, threads):
    given, documents, grad = drawn(shape, dtype)
    how = {"scale": shape[-1] ** -0.5, "softcap": pattern.get("softcap"), "window": pattern.get("window")}
    documents = documents if "documents" in pattern else None
    with with_threads(threads):
        out = causal.attend(*given, segments_BL=documents, **how)
        out.backward(grad)
    exact = [x.detach().double().requires_grad_() for x in given]
    expected = by_hand(*exact, documents=documents, **how)
    expected.backward(grad.double())
    assert out.dtype == dtype and out.transpose(1, 2).is_contiguous()
    for found, right in [(out, expected), *((x.grad, y.grad) for x, y in zip(given, exact, strict=True))]:
        # Of one position the weight is 1 whatever its score: gradients of queries and keys are zero, and here what is rounded.
        assert (found - right).abs().max() <= (1e-5 if dtype == torch.float32 else 2e-2) * max(right.abs().max(), 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_documents_learn_nothing_of_one_another(dtype):
    given, _, grad = drawn((1, 2, 1, 150, 32), dtype)
    documents = (torch.arange(150) >= 70).long()[None]
    grad[:, :, :70] = 0
    causal.attend(*given, scale=0.2, segments_BL=documents).backward(grad)
    for x in given:
        assert not x.grad[:, :, :70].any() and x.grad[:, :, 70:].any()


def test_documents_may_be_those_of_all_rows_and_of_any_integers():
    given, documents, _ = drawn((2, 2, 1, 90, 32), torch.float32)
    of_both = documents[:1].expand(2, -1)
    expected = causal.attend(*given, scale=0.2, segments_BL=of_both)
    assert torch.equal(causal.attend(*given, scale=0.2, segments_BL=documents[:1].int()), expected)


def test_results_are_the_same_bits_however_many_threads_there_are():
    found = []
    for threads in (1, 2):
        given, _, grad = drawn((3, 4, 2, 300, 64), torch.bfloat16)
        with with_threads(threads):
            out = causal.attend(*given, scale=0.125)
            out.backward(grad)
        found.append([out, *(x.grad for x in given)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_is_not_side_by_side_is_copied():
    given, _, grad = drawn((1, 4, 2, 90, 32), torch.float32)
    expected = torch.autograd.grad(causal.attend(*given, scale=0.2), given, grad)
    turned = [x.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for x in given]
    found = torch.autograd.grad(causal.attend(*turned, scale=0.2), turned, grad.transpose(2, 3).contiguous().transpose(2, 3))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_other_sizes_and_dtypes_are_left_to_torch():
    def ones(*shape, **how):
        return torch.ones(shape, **how)

    assert causal.takes(ones(1, 2, 4, 16), ones(1, 1, 4, 16), ones(1, 1, 4, 16))
    assert not causal.takes(ones(1, 2, 4, 24), ones(1, 1, 4, 24), ones(1, 1, 4, 24))
    for other in ((1, 1, 5, 16), (2, 1, 4, 16), (1, 1, 4, 32), (1, 3, 4, 16), (1, 0, 4, 16)):  # length, rows, width, heads
        assert not causal.takes(ones(1, 2, 4, 16), ones(*other), ones(*other))
    assert not causal.takes(*(ones(1, 2, 4, 16, dtype=torch.float64) for _ in range(3)))
    assert not causal.takes(*(ones(1, 2, 4, 16, device="meta") for _ in range(3)))


def test_a_plan_knows_what_comes_back():
    given, documents, grad = drawn((2, 4, 2, 60, 32), torch.bfloat16)
    real = causal.attend(*given, scale=0.2, segments_BL=documents)
    gradients = torch.autograd.grad(real, given, grad)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in given]
        assert causal.takes(*fakes)
        out = causal.attend(*fakes, scale=0.2, segments_BL=mode.from_tensor(documents))
        planned = torch.autograd.grad(out, fakes, mode.from_tensor(grad))
    for a, b in zip([out, *planned], [real, *gradients], strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_neither_scores_nor_masks_are_in_memory():
    given, documents, grad = drawn((1, 4, 2, 1024, 32), torch.float32)
    attention = SDPAttention(None)
    with allocations(CPU) as found:
        plan = attention.plan(Pattern(1024, 500, documents), CPU)
        attention.attend(*given, plan, scale=0.2).backward(grad)
    queries = 4 * 1024 * 32 * 4
    scores = 4 * 1024 * 1024 * 4
    assert found.peak_bytes < 5 * queries < scores / 6


def test_within_a_compiled_block():
    given, _, grad = drawn((1, 4, 2, 90, 32), torch.float32)
    attention = SDPAttention(None)

    def block(q, k, v):
        return attention.attend(q * 2, k, v, None, scale=0.2) + 1

    expected = torch.autograd.grad(block(*given), given, grad)
    found = torch.autograd.grad(torch.compile(block, backend="aot_eager", fullgraph=True)(*given), given, grad)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_gradients_can_be_differentiated_again(pattern):
    given, documents, grad = drawn((2, 4, 2, 40, 16), torch.float32)
    documents = documents if "documents" in pattern else None
    how = {"scale": 0.25, "softcap": pattern.get("softcap"), "window": pattern.get("window")}
    exactly = [x.detach().double().requires_grad_() for x in given]
    found = []
    for compute, inputs, name in ((causal.attend, given, "segments_BL"), (by_hand, exactly, "documents")):
        gradients = torch.autograd.grad(compute(*inputs, **{name: documents}, **how), inputs, grad.to(inputs[0].dtype), create_graph=True)
        norm = sum(x.square().sum() for x in gradients)
        found.append([*gradients, *torch.autograd.grad(norm, inputs)])
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= 2e-5 * b.abs().max()


def test_a_graph_that_is_kept_gives_the_same_gradients_again():
    given, _, grad = drawn((1, 4, 2, 90, 32), torch.bfloat16)
    out = causal.attend(*given, scale=0.2)
    first, second = (torch.autograd.grad(out, given, grad, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_transforms_are_left_to_torch(monkeypatch):
    given, _, along = drawn((1, 2, 2, 40, 16), torch.float32)
    q, k, v = (x.detach() for x in given)
    attention = SDPAttention(None)

    def loss(q):
        return attention.attend(q, k, v, attention.plan(Pattern(40, 17), CPU), scale=0.2).square().sum()

    # torch's fused kernel has no forward mode either: scores are written out.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found = torch.func.jvp(loss, (q,), (along,))[1], torch.func.grad(loss)(q)
        monkeypatch.setenv("FW_TRAINING_KERNELS", "off")
        expected = torch.func.jvp(loss, (q,), (along,))[1], torch.func.grad(loss)(q)
    for a, b in zip(found, expected, strict=True):
        assert a.abs().max() > 0 and torch.equal(a, b)


@pytest.mark.parametrize("window", [1 << 31, (1 << 32) + 1, (1 << 62)])
def test_a_window_longer_than_everything_is_none(window):
    given, documents, grad = drawn((2, 4, 2, 90, 32), torch.float32)
    found = []
    for width in (window, None):
        out = causal.attend(*given, scale=0.2, window=width, segments_BL=documents)
        found.append([out, *torch.autograd.grad(out, given, grad)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
