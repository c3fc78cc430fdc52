"""Attention plugins against a loop over heads and positions."""

from __future__ import annotations

import pytest
import torch

from fw.kinds.attention import Pattern
from fw_plugins.attention.eager import EagerAttention
from fw_plugins.attention.sdpa import SDPAttention

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


@pytest.mark.parametrize("plugin", [SDPAttention, EagerAttention])
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
    atol = 1e-6 if plugin is EagerAttention or softcap else 1e-12  # eager takes its softmax in fp32
    torch.testing.assert_close(out, by_hand(q, k, v, window, segments, softcap), atol=atol, rtol=0)


@pytest.mark.parametrize("plugin", [SDPAttention, EagerAttention])
def test_dropout_drops_and_keeps_the_mean(plugin):
    q, k = torch.randn(1, 2, 64, 8), torch.randn(1, 2, 64, 8)
    v = torch.ones(1, 2, 64, 8)
    made = plugin(None)
    out = made.attend(q, k, v, made.plan(Pattern(64), torch.device("cpu")), scale=SCALE, dropout=0.5)
    assert out[..., 32:, :].mean() == pytest.approx(1, abs=0.1) and out.std() > 0.05
