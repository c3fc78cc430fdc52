"""The kernel of attention to blocks, and what does the same in torch's operators, against attention written out in fp64."""

from __future__ import annotations

import pytest
import torch

from fw.kernels import attention
from fw.kinds.kv_cache import KVNeeds, Stretch
from fw.kinds.model import KVShape
from fw_plugins.kv_cache import in_blocks
from fw_plugins.kv_cache.blocks import BlockPool
from fw_plugins.kv_cache.in_blocks import Bounds, CacheInBlocks
from fw_plugins.kv_cache.keeping import Float8, Int4, Int8, Plain
from kernels.flags import NO_PAIRS, NO_TILES, TILES_IN_SOFTWARE, compiled_so

CPU = torch.device("cpu")
LENGTHS = (1, 5, 255, 256, 257, 700, 3)
BLOCK = 8


def expected(q_QNH, k_LKH, v_LKH, window, scale, softcap, sinks=0):
    """Of the last Q positions."""
    group = q_QNH.shape[1] // k_LKH.shape[1]
    k_LNH, v_LNH = (x.double().repeat_interleave(group, 1) for x in (k_LKH, v_LKH))
    scores_NQL = torch.einsum("qnh,lnh->nql", q_QNH.double(), k_LNH) * scale
    if softcap is not None:
        scores_NQL = softcap * torch.tanh(scores_NQL / softcap)
    queries, keys = scores_NQL.shape[1:]
    for row in range(queries):
        own = keys - queries + row
        for key in range(keys):
            if key > own or (window is not None and key <= own - window and key >= sinks):
                scores_NQL[:, row, key] = -torch.inf
    return torch.einsum("nql,lnh->qnh", scores_NQL.softmax(-1), v_LNH)


def cache_for(dtype, kv_heads, dim, window=None, keeping=None, bounds=None, lengths=LENGTHS, block=BLOCK):
    pool = BlockPool(sum(-(-length // block) for length in lengths) + 3, block, reuse=bounds is None)
    cache = CacheInBlocks(KVNeeds([KVShape(kv_heads, dim, window)], dtype, CPU, 0, 1024, 64), pool, keeping or Plain(dtype), bounds)
    for kept in (*cache._keys, *cache._values):
        kept.fill_(255)  # not a number; what nobody has written is never looked at
    return cache


OTHERS = {"kernel without tiles": NO_TILES, "kernel without pairs": NO_PAIRS, "kernel by tiles in software": TILES_IN_SOFTWARE}


@pytest.fixture(params=["kernel", *OTHERS, "operators"])
def how(request, monkeypatch):
    if request.param == "operators":
        monkeypatch.setattr(in_blocks, "available", lambda *_: False)
    elif not attention.available(torch.float32, CPU):
        pytest.skip("no compiler")
    if request.param in OTHERS:
        compiled_so(monkeypatch, OTHERS[request.param], attention, "_ATTEND", "_KEEP")
    return request.param


def same(how, found, other, dtype):
    """The kernel gives the same to the last bit."""
    if how != "operators":
        assert torch.equal(found, other)
    else:
        torch.testing.assert_close(found, other, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.06)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 4, 16), (6, 2, 20), (8, 1, 64), (12, 2, 128)])
@pytest.mark.parametrize("window, softcap", [(None, None), (9, None), (300, 5.0)])
def test_a_token_of_each_sequence(how, dtype, heads, kv_heads, dim, window, softcap):
    torch.manual_seed(0)
    cache = cache_for(dtype, kv_heads, dim, window)
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
    right = torch.cat([expected(q[None], k, v, window, scale, softcap) for q, (k, v) in zip(q_BNH, whole, strict=True)])
    torch.testing.assert_close(found.double(), right, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.03)
    for number, stretch in enumerate(stretches):
        cache.begin([stretch])
        alone = cache.attend(0, q_BNH[number : number + 1], *(x[number : number + 1] for x in last), scale=scale, softcap=softcap)
        same(how, alone[0], found[number], dtype)


def in_pieces(cache, q_LNH, k_LKH, v_LKH, pieces, **settings):
    """A sequence that comes so many tokens at a time; what each gets."""
    found, at = [], 0
    for number, length in enumerate(pieces):
        assert cache.reserve(0, at, at + length), number
        cache.begin([Stretch(0, at, length)])
        now = slice(at, at + length)
        found.append(cache.attend(0, q_LNH[now], k_LKH[now], v_LKH[now], **settings))
        at += length
    cache.release(0)
    return torch.cat(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 4, 32), (6, 2, 20), (4, 1, 64)])
@pytest.mark.parametrize("window, softcap", [(None, None), (40, None), (None, 5.0)])
def test_pieces_of_a_sequence(how, dtype, heads, kv_heads, dim, window, softcap):
    torch.manual_seed(1)
    length = 330
    q_LNH = (2 * torch.randn(length, heads, dim)).to(dtype)
    k_LKH, v_LKH = torch.randn(2, length, kv_heads, dim).to(dtype)
    cache = cache_for(dtype, kv_heads, dim, window, lengths=(length,))
    settings = {"scale": dim**-0.5, "softcap": softcap}
    whole = in_pieces(cache, q_LNH, k_LKH, v_LKH, [length], **settings)
    right = expected(q_LNH, k_LKH, v_LKH, window, settings["scale"], softcap)
    torch.testing.assert_close(whole.double(), right, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.03)
    for pieces in ([200, 130], [7, 1, 1, 250, 17, 54], [255] + [1] * 75):
        same(how, in_pieces(cache, q_LNH, k_LKH, v_LKH, pieces, **settings), whole, dtype)


@pytest.mark.parametrize("block", [16, 24])
@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 4, 32), (8, 2, 96), (40, 2, 64), (70, 1, 32)])
@pytest.mark.parametrize("window, sinks", [(None, 0), (40, 0), (40, 5)])
def test_blocks_whose_rows_lie_together(how, block, heads, kv_heads, dim, window, sinks):
    """Sixteen rows are a tile as they lie, where a block is not at its end; of more heads than rows of a tile, several."""
    torch.manual_seed(3)
    length, dtype = 300, torch.bfloat16
    q_LNH = (2 * torch.randn(length, heads, dim)).to(dtype)
    k_LKH, v_LKH = torch.randn(2, length, kv_heads, dim).to(dtype)
    bounds = Bounds(window, sinks) if sinks else None
    cache = cache_for(dtype, kv_heads, dim, None if sinks else window, bounds=bounds, lengths=(2 * length,), block=block)
    whole = in_pieces(cache, q_LNH, k_LKH, v_LKH, [length], scale=dim**-0.5)
    right = expected(q_LNH, k_LKH, v_LKH, window, dim**-0.5, None, sinks)
    torch.testing.assert_close(whole.double(), right, rtol=0, atol=0.03)
    same(how, in_pieces(cache, q_LNH, k_LKH, v_LKH, [1, 230, *[1] * 69], scale=dim**-0.5), whole, dtype)


@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 4, 32), (6, 2, 20), (4, 1, 64)])
@pytest.mark.parametrize("sinks", [0, 3, 17])
def test_first_and_last_tokens(how, heads, kv_heads, dim, sinks):
    torch.manual_seed(2)
    length, window = 600, 40
    q_LNH = 2 * torch.randn(length, heads, dim)
    k_LKH, v_LKH = torch.randn(2, length, kv_heads, dim)
    right = expected(q_LNH, k_LKH, v_LKH, window, 0.2, None, sinks)
    bounds = Bounds(window, sinks)
    cache = cache_for(torch.float32, kv_heads, dim, bounds=bounds, lengths=(CacheInBlocks.most_kept(bounds, 64, BLOCK),))
    assert cache.capacity == 1024, "more than there is room for at once"
    for pieces in ([64] * 9 + [24], [1] * 50 + [60] * 9 + [10], [63] + [1] * 537):
        most = 0
        found, at = [], 0
        for piece in pieces:
            assert cache.reserve(0, at, at + piece)
            most = max(most, cache.live_bytes)
            cache.pool.check()
            cache.begin([Stretch(0, at, piece)])
            found.append(cache.attend(0, *(x[at : at + piece] for x in (q_LNH, k_LKH, v_LKH)), scale=0.2))
            at += piece
        cache.release(0)
        torch.testing.assert_close(torch.cat(found).double(), right, rtol=0, atol=1e-5)
        assert most <= CacheInBlocks.most_kept(bounds, max(pieces), BLOCK) * 2 * kv_heads * dim * 4
        assert cache.live_bytes == 0
    # Beside others, whose blocks it gets and leaves.
    small = cache_for(torch.float32, kv_heads, dim, bounds=bounds, lengths=(length, length))
    found = []
    for at in range(0, length, 30):
        both = [Stretch(number, at, 30) for number in (0, 1)]
        assert all(small.reserve(number, at, at + 30) for number in (0, 1))
        small.begin(both)
        now = slice(at, at + 30)
        found.append(small.attend(0, q_LNH[now].repeat(2, 1, 1), k_LKH[now].repeat(2, 1, 1), v_LKH[now].repeat(2, 1, 1), scale=0.2)[30:])
    torch.testing.assert_close(torch.cat(found).double(), right, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 20, 64, 96])
@pytest.mark.parametrize("make, step", [(lambda d: Int8(d, 32), 127), (lambda d: Int4(d, 32), 7.5), (lambda d: Int8(d, 16), 127)])
def test_fewer_bits(dtype, dim, make, step):
    """Codes are within half a step of the numbers, whoever writes them; and the kernel computes with what they stand for."""
    if not attention.available(dtype, CPU):
        pytest.skip("no compiler")
    torch.manual_seed(3)
    keeping = make(dtype)
    x_TKH = (torch.randn(50, 3, dim) * torch.rand(50, 3, 1).exp()).to(dtype)
    x_TKH[3] = 0
    rows = keeping.rows(dim)
    blocks = torch.full((12, 3, 5, rows.bytes), 7, dtype=torch.uint8)
    slots = torch.randperm(60)[:50]
    attention.keep(x_TKH, slots, blocks, rows)
    written = blocks.transpose(1, 2).flatten(0, 1)
    assert rows.bytes == keeping.row_bytes(dim) == keeping.encode(x_TKH).shape[-1]
    assert torch.equal(written[slots], keeping.encode(x_TKH)), "codes of the kernel are those of the operators"
    untouched = torch.ones(60, dtype=torch.bool)
    untouched[slots] = False
    assert (written[untouched] == 7).all()
    back = keeping.decode(written[slots], dim).float()
    largest = x_TKH.float().abs().amax(-1, keepdim=True)
    assert ((back - x_TKH.float()).abs() <= largest * (0.51 / step + 2**-7)).all()
    assert not back[3].any()

    heads, length = 6, 300
    q_LNH = torch.randn(length, heads, dim).to(dtype)
    k_LKH, v_LKH = torch.randn(2, length, 3, dim).to(dtype)
    exact = type(keeping)(torch.float32, keeping._group)  # what codes stand for, not rounded again
    k_known, v_known = (exact.decode(keeping.encode(x), dim) for x in (k_LKH, v_LKH))
    right = expected(q_LNH, k_known, v_known, None, dim**-0.5, None)
    whole = None
    for pieces in ([length], [100, 1, 199], [290] + [1] * 10):
        found = in_pieces(cache_for(dtype, 3, dim, keeping=keeping), q_LNH, k_LKH, v_LKH, pieces, scale=dim**-0.5)
        torch.testing.assert_close(found.double(), right, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.01)
        whole = found if whole is None else whole
        assert torch.equal(found, whole)


@pytest.mark.parametrize("make, error", [(lambda d: Int8(d, 32), 0.02), (lambda d: Int4(d, 32), 0.15), (Float8, 0.1)])
def test_fewer_bits_in_operators(monkeypatch, make, error):
    monkeypatch.setattr(in_blocks, "available", lambda *_: False)
    torch.manual_seed(4)
    q_LNH, k_LKH, v_LKH = torch.randn(3, 90, 4, 64)
    right = expected(q_LNH, k_LKH, v_LKH, None, 0.125, None)
    for pieces in ([90], [40, 1, 49], [60] + [1] * 30):
        found = in_pieces(cache_for(torch.float32, 4, 64, keeping=make(torch.float32)), q_LNH, k_LKH, v_LKH, pieces, scale=0.125)
        assert ((found - right).norm() / right.norm()) < error


def test_bytes_of_a_row():
    assert Plain(torch.bfloat16).row_bytes(64) == 128
    assert Int8(torch.bfloat16, 32).row_bytes(64) == 64 + 2 * 2
    assert Int4(torch.bfloat16, 32).row_bytes(64) == 32 + 2 * 4
    assert Float8(torch.bfloat16).row_bytes(64) == 68
    assert Int8(torch.bfloat16, 32).row_bytes(20) == 22, "one scale where groups do not divide the head"
    assert Int4(torch.bfloat16, 32).row_bytes(20) == 10 + 2 * 4
