"""Attention plugins against a loop over heads and positions."""

from __future__ import annotations

import math

import pytest
import torch

from fw_plugins.attention.eager import EagerAttention
from fw_plugins.attention.sdpa import SDPAttention


def by_hand(q, k, v, causal):
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for n in range(q.shape[1]):
            group = n // (q.shape[1] // k.shape[1])
            for i in range(q.shape[2]):
                seen = slice(0, i + 1 if causal else None)
                weights = (k[b, group, seen] @ q[b, n, i] / math.sqrt(q.shape[-1])).softmax(0)
                out[b, n, i] = weights @ v[b, group, seen]
    return out


@pytest.mark.parametrize("plugin", [SDPAttention, EagerAttention])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_equals_the_definition(plugin, causal, kv_heads):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 9, 6, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(2, kv_heads, 9, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    out = plugin(None).attend(q, k, v, causal=causal)
    atol = 1e-6 if plugin is EagerAttention else 1e-12  # eager takes its softmax in fp32
    torch.testing.assert_close(out, by_hand(q, k, v, causal), atol=atol, rtol=0)
