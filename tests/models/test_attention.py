"""Attention plugins against a loop over heads and positions."""

from __future__ import annotations

import sys

import pytest
import torch

from fw.kinds.attention import Pattern
from fw.meter.allocations import allocations
from fw_plugins.attention.chunked import ChunkedAttention, ChunkedConfig
from fw_plugins.attention.eager import EagerAttention
from fw_plugins.attention.flash_attn import FlashAttention, FlashAttentionConfig
from fw_plugins.attention.sdpa import SDPAttention
from models import flash_attn_stand_in

SCALE = 0.3
SEGMENTS = [[0, 0, 1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 2, 3, 3]]


def by_hand(q, k, v, window, segments, softcap):
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for n in range(q.shape[1]):
            group = n // (q.shape[1] // k.shape[1])
            for i in range(q.shape[2]):
                seen = [j for j in range(i + 1) if window is None or i - j < window]
                seen = [j for j in seen if not segments or segments[b][i] == segments[b][j]]
                scores = SCALE * k[b, group, seen] @ q[b, n, i]
                scores = softcap * torch.tanh(scores / softcap) if softcap else scores
                out[b, n, i] = scores.softmax(0) @ v[b, group, seen]
    return out


def chunked(queries: int = 4):
    return lambda _: ChunkedAttention(ChunkedConfig(queries))


def flash(_=None):
    return FlashAttention(FlashAttentionConfig())


PLUGINS = {"sdpa": SDPAttention, "eager": EagerAttention, "chunked": chunked(), "in one chunk": chunked(9), "flash_attn": flash}


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn_stand_in)


@pytest.mark.parametrize("plugin", PLUGINS.values(), ids=PLUGINS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["one document", "several"])
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_equals_the_definition(plugin, kv_heads, window, segments, softcap):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 9, 6, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(2, kv_heads, 9, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    made = plugin(None)
    plan = made.plan(Pattern(9, window, None if segments is None else torch.tensor(segments)), torch.device("cpu"))
    out = made.attend(q, k, v, plan, scale=SCALE, softcap=softcap)
    atol = 1e-12 if plugin is flash or (plugin is SDPAttention and not softcap) else 1e-6  # others take their softmax in fp32
    torch.testing.assert_close(out, by_hand(q, k, v, window, segments, softcap), atol=atol, rtol=0)


@pytest.mark.parametrize("plugin", PLUGINS.values(), ids=PLUGINS)
def test_dropout_drops_and_keeps_the_mean(plugin):
    q, k = torch.randn(1, 2, 64, 8), torch.randn(1, 2, 64, 8)
    v = torch.ones(1, 2, 64, 8)
    made = plugin(None)
    out = made.attend(q, k, v, made.plan(Pattern(64), torch.device("cpu")), scale=SCALE, dropout=0.5)
    assert out[..., 32:, :].mean() == pytest.approx(1, abs=0.1) and out.std() > 0.05


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["one document", "several"])
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_gradients_are_those_of_scores_written_out(window, segments, softcap):
    found = []
    for plugin in (EagerAttention, chunked(2), chunked(4), flash):
        generator = torch.Generator().manual_seed(0)
        q = torch.randn(2, 4, 9, 6, generator=generator).requires_grad_()
        k, v = (torch.randn(2, 2, 9, 6, generator=generator).requires_grad_() for _ in range(2))
        made = plugin(None)
        plan = made.plan(Pattern(9, window, None if segments is None else torch.tensor(segments)), torch.device("cpu"))
        out = made.attend(q, k, v, plan, scale=SCALE, softcap=softcap)
        (out * torch.arange(out.numel()).view(out.shape).sin()).sum().backward()
        found.append((q.grad, k.grad, v.grad))
    for some in found[1:]:
        for a, b in zip(some, found[0], strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_a_chunk_repeats_its_dropout():
    """The gradient of a sum of weights that are dropped alike forward and backward: v's is what went into the result."""
    q, k = torch.randn(1, 2, 32, 8), torch.randn(1, 2, 32, 8)
    v = torch.eye(32).expand(1, 2, 32, 32).clone().requires_grad_()
    made = chunked(8)(None)
    out = made.attend(q, k, v, made.plan(Pattern(32), torch.device("cpu")), scale=SCALE, dropout=0.5)
    out.sum().backward()
    torch.testing.assert_close(v.grad, out.sum(2)[..., None].expand_as(v))


def test_scores_of_one_chunk_exist_at_a_time():
    heads, length, size = 4, 1024, 64
    peaks = {}
    for name, made in {"eager": EagerAttention(None), "chunked": chunked(size)(None)}.items():
        q, k, v = (torch.randn(1, heads, length, 8).requires_grad_() for _ in range(3))
        plan = made.plan(Pattern(length, 512), torch.device("cpu"))
        with allocations(torch.device("cpu")) as found:
            made.attend(q, k, v, plan, scale=SCALE, softcap=5.0).sum().backward()
        peaks[name] = found.peak_bytes
    scores = heads * length * 4
    assert peaks["eager"] > 3 * length * scores
    window = heads * (512 + size) * 4
    assert peaks["chunked"] < 8 * size * window + 40 * heads * length * 8 * 4
