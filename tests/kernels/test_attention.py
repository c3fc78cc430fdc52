"""The kernel of attention to blocks, and what does the same in torch's operators, against attention written out in fp64."""

from __future__ import annotations

import pytest
import torch

from fw.kernels import attention
from fw.kinds.kv_cache import KVNeeds, Stretch
from fw.kinds.model import KVShape
from fw_plugins.kv_cache import paged
from fw_plugins.kv_cache.blocks import BlockPool

CPU = torch.device("cpu")
LENGTHS = (1, 5, 255, 256, 257, 700, 3)


def expected(q_NH, k_LKH, v_LKH, window, scale, softcap):
    group = len(q_NH) // k_LKH.shape[1]
    k_LNH, v_LNH = (x.double().repeat_interleave(group, 1) for x in (k_LKH, v_LKH))
    scores_NL = torch.einsum("nh,lnh->nl", q_NH.double(), k_LNH) * scale
    if softcap is not None:
        scores_NL = softcap * torch.tanh(scores_NL / softcap)
    if window is not None:
        scores_NL[:, : max(0, scores_NL.shape[1] - window)] = -torch.inf
    return torch.einsum("nl,lnh->nh", scores_NL.softmax(-1), v_LNH)


@pytest.mark.parametrize("how", ["kernel", "operators"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 4, 16), (6, 2, 20), (8, 1, 64)])
@pytest.mark.parametrize("window, softcap", [(None, None), (9, None), (300, 5.0)])
def test_a_token_of_each_sequence(monkeypatch, how, dtype, heads, kv_heads, dim, window, softcap):
    if how == "operators":
        monkeypatch.setattr(paged, "available", lambda *_: False)
    elif not attention.available(dtype, CPU):
        pytest.skip("no compiler")
    torch.manual_seed(0)
    pool = BlockPool(sum(-(-length // 8) for length in LENGTHS) + 3, 8)
    cache = paged.PagedCache(KVNeeds([KVShape(kv_heads, dim, window)], dtype, CPU, 0, 1024), pool)
    for kept in (*cache._keys, *cache._values):
        kept.fill_(torch.nan)  # what nobody has written is never looked at
    whole = []
    for number, length in enumerate(LENGTHS):
        k_LKH, v_LKH = torch.randn(2, length, kv_heads, dim).to(dtype)
        whole.append((k_LKH, v_LKH))
        if length > 1:
            assert cache.reserve(number, 0, length - 1)
            cache.begin([Stretch(number, 0, length - 1)])
            cache.attend(0, torch.zeros(length - 1, heads, dim, dtype=dtype), k_LKH[:-1], v_LKH[:-1], scale=1.0, softcap=softcap)
        assert cache.reserve(number, length - 1, length)
    scale = dim**-0.5
    q_BNH = (2 * torch.randn(len(LENGTHS), heads, dim)).to(dtype)
    last = [torch.stack([pair[which][-1] for pair in whole]) for which in (0, 1)]
    stretches = [Stretch(number, length - 1, 1) for number, length in enumerate(LENGTHS)]
    cache.begin(stretches)
    found = cache.attend(0, q_BNH, *last, scale=scale, softcap=softcap)
    right = torch.stack([expected(q, k, v, window, scale, softcap) for q, (k, v) in zip(q_BNH, whole, strict=True)])
    torch.testing.assert_close(found.double(), right, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.03)
    for number, stretch in enumerate(stretches):
        cache.begin([stretch])
        alone = cache.attend(0, q_BNH[number : number + 1], *(x[number : number + 1] for x in last), scale=scale, softcap=softcap)
        if how == "kernel":
            assert torch.equal(alone[0], found[number]), "alone, and beside others"
        else:
            torch.testing.assert_close(alone[0], found[number], rtol=0, atol=1e-5 if dtype == torch.float32 else 0.03)
