"""Attention to keys and values in blocks, on GPUs, which are read where they are and as they are kept.

Where a sequence has few tokens its keys are divided among programs, whose results are put together by a second kernel (Flash-Decoding, Dao
et al. 2023, https://crfm.stanford.edu/2023/10/12/flashdecoding.html). Shape suffixes as in :mod:`fw.kernels.attention`.

A kernel is compiled anew, for half a second, for each other value of what it knows when it is compiled: that is what stays with a model,
and nothing that comes with a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fw.kernels.attention import Rows
from fw.kernels.gpu_elementwise import keep

__all__ = ["FEW", "Where", "attend_blocks", "keep", "takes"]

FEW = 8
"""Tokens of a sequence up to which its keys are divided."""
_MOST_ROWS = 64
"""Query heads of a key head, over the tokens of a sequence, that a program computes."""
_KEYS = 64
_PROGRAMS = 264
"""Wanted at least: two for each multiprocessor of a large GPU."""
_MOST_PARTS = 32


@triton.jit
def _numbers(kept, scales, row_N, dim, seen_N, inside, KIND: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr):
    """``[N, H]`` of rows that begin there; of codes in fp32."""
    mask = seen_N[:, None] & inside[None, :]
    at_NH = row_N[:, None] + dim[None, :]
    if KIND == "int8":
        codes_NH = tl.load(kept + at_NH, mask=mask, other=0).to(tl.int8, bitcast=True).to(tl.float32)
        scale_NH = (row_N[:, None] + DIM) // 2 + (dim // GROUP)[None, :]
        found_NH = codes_NH * tl.load(scales + scale_NH, mask=mask, other=0.0).to(tl.float32)
    elif KIND == "int4":
        half: tl.constexpr = DIM // 2
        pairs_NH = tl.load(kept + row_N[:, None] + (dim % half)[None, :], mask=mask, other=0).to(tl.int32)
        codes_NH = ((pairs_NH >> ((dim // half) * 4)[None, :]) & 15).to(tl.float32)
        scale_NH = (row_N[:, None] + half) // 2 + (dim // GROUP * 2)[None, :]
        step_NH = tl.load(scales + scale_NH, mask=mask, other=0.0).to(tl.float32)
        found_NH = codes_NH * step_NH + tl.load(scales + scale_NH + 1, mask=mask, other=0.0).to(tl.float32)
    else:
        found_NH = tl.load(kept + at_NH, mask=mask, other=0.0)
    return found_NH


@triton.jit(do_not_specialize=["blocks", "tile_count", "part_count", "query_count"])
def _attend(
    q, keys, values, key_scales, value_scales, tables, starts, lengths, begins, out, parts, logs,
    scale, softcap, window, sinks, q_step, blocks, tile_count, part_count, query_count,
    KIND: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr,
    ROW: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, DIVIDED: tl.constexpr,
    CAPPED: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    sequence, tile = tl.program_id(0) // tile_count, tl.program_id(0) % tile_count
    kv, part = tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    start = tl.load(starts + sequence)
    begin = tl.load(begins + sequence).to(tl.int64)
    share: tl.constexpr = HEADS // KV
    rows = tile * ROWS + tl.arange(0, ROWS)
    query_M, head_M = rows // share, kv * share + rows % share
    first_query = tile * ROWS // share
    dim = tl.arange(0, WIDE)
    inside = dim < DIM
    mine_M = query_M < length
    q_MH = tl.load(
        q + (begin + query_M)[:, None] * q_step + (head_M * DIM)[:, None] + dim[None, :], mask=mine_M[:, None] & inside[None, :], other=0.0
    )
    position_M = start + query_M
    total = start + tl.minimum(length, (tile * ROWS + ROWS - 1) // share + 1)
    if first_query >= length:
        total = start * 0
    first = start * 0
    if WINDOW:
        first = tl.maximum(0, start + first_query - window + 1)
    lowest = first
    if SINKS:
        lowest = start * 0
    each = tl.cdiv(tl.cdiv(total - lowest, BLOCK), part_count) * BLOCK
    low = lowest + part * each
    high = tl.minimum(total, low + each)
    most_M = tl.full([ROWS], -float("inf"), tl.float32)
    sum_M = tl.zeros([ROWS], tl.float32)
    acc_MH = tl.zeros([ROWS, WIDE], tl.float32)
    for at in range(low, high, BLOCK):
        pos_N = at + tl.arange(0, BLOCK)
        there_N = (pos_N < high) & ((pos_N >= first) | (pos_N < sinks))
        block_N = tl.load(tables + sequence.to(tl.int64) * blocks + pos_N // SIZE, mask=there_N, other=0).to(tl.int64)
        # The place in a block is multiplied before it is added to: of a sum Triton believes that each number is as aligned as the first.
        row_N = (block_N * KV + kv) * (SIZE * ROW) + pos_N % SIZE * ROW
        k_NH = _numbers(keys, key_scales, row_N, dim, there_N, inside, KIND, DIM, GROUP).to(q_MH.dtype)
        score_MN = tl.dot(q_MH, tl.trans(k_NH), input_precision="ieee") * scale
        if CAPPED:
            turned = tl.exp(-2 * tl.abs(score_MN) / softcap)
            score_MN = tl.where(score_MN < 0, -1.0, 1.0) * softcap * (1 - turned) / (1 + turned)
        behind_MN = position_M[:, None] - pos_N[None, :]
        seen_MN = there_N[None, :] & (behind_MN >= 0)
        if WINDOW:
            seen_MN = seen_MN & ((behind_MN < window) | (pos_N < sinks)[None, :])
        score_MN = tl.where(seen_MN, score_MN, -float("inf"))
        new_M = tl.maximum(most_M, tl.max(score_MN, 1))
        safe_M = tl.where(new_M == -float("inf"), 0.0, new_M)
        p_MN = tl.exp(score_MN - safe_M[:, None])
        faded_M = tl.exp(most_M - safe_M)
        sum_M = sum_M * faded_M + tl.sum(p_MN, 1)
        v_NH = _numbers(values, value_scales, row_N, dim, there_N, inside, KIND, DIM, GROUP).to(q_MH.dtype)
        acc_MH = acc_MH * faded_M[:, None] + tl.dot(p_MN.to(v_NH.dtype), v_NH, input_precision="ieee")
        most_M = new_M
    found_MH = acc_MH / tl.where(sum_M > 0, sum_M, 1.0)[:, None]
    if not DIVIDED:
        written_M = tl.where(length < 0, query_M == 0, mine_M)
        to = out + (begin + query_M)[:, None] * (HEADS * DIM) + (head_M * DIM)[:, None] + dim[None, :]
        tl.store(to, found_MH.to(out.dtype.element_ty), mask=written_M[:, None] & inside[None, :])
    else:
        one_M = ((sequence.to(tl.int64) * query_count + query_M) * HEADS + head_M) * part_count + part
        tl.store(parts + one_M[:, None] * DIM + dim[None, :], found_MH, mask=mine_M[:, None] & inside[None, :])
        log_M = tl.where(sum_M > 0, most_M + tl.log(tl.where(sum_M > 0, sum_M, 1.0)), -float("inf"))
        tl.store(logs + one_M, log_M, mask=mine_M)


@triton.jit(do_not_specialize=["part_count", "query_count"])
def _put_together(
    parts, logs, lengths, begins, out, part_count, query_count,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    sequence, query, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    dim, part = tl.arange(0, WIDE), tl.arange(0, MOST)
    inside = dim < DIM
    to = out + ((tl.load(begins + sequence).to(tl.int64) + query) * HEADS + head) * DIM + dim
    if query < length:
        one_P = ((sequence.to(tl.int64) * query_count + query) * HEADS + head) * part_count + part
        log_P = tl.load(logs + one_P, mask=part < part_count, other=-float("inf"))
        share_P = tl.exp(log_P - tl.max(log_P, 0))
        found_PH = tl.load(parts + one_P[:, None] * DIM + dim[None, :], mask=(part < part_count)[:, None] & inside[None, :], other=0.0)
        found_H = tl.sum(found_PH * share_P[:, None], 0) / tl.sum(share_P, 0)
        tl.store(to, found_H.to(out.dtype.element_ty), mask=inside)
    elif (query == 0) & (length < 0):
        tl.store(to, tl.zeros([WIDE], tl.float32).to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Where:
    """Sequences of a step, in tensors on the GPU.

    Attributes:
        tables_BM: int32; blocks of each sequence, in order. Blocks of positions that nobody sees may be any number.
        starts_B: int32; position of each sequence's first token here; ``begins_B`` the row of it.
        lengths_B: int32; how many there are. Of a sequence of 0 nothing is written; -1 is none, whose row becomes 0.
        queries: most of ``lengths_B``.
    """

    tables_BM: Tensor
    starts_B: Tensor
    begins_B: Tensor
    lengths_B: Tensor
    queries: int


def takes(rows: Rows | None) -> bool:
    """Whether keys and values that are kept so are read here."""
    return rows is not None and rows.dim <= 256 and (rows.kind != "int4" or rows.dim % 4 == 0)


def attend_blocks(
    q_TNH: Tensor,
    keys_CKSR: Tensor,
    values_CKSR: Tensor,
    rows: Rows,
    sequences: Sequence[Where],
    *,
    window: int | None,
    sinks: int = 0,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """``[T, N, H]`` of the tokens of a step's sequences, which are the last of their sequences.

    Args:
        q_TNH: heads of a token behind one another.
        keys_CKSR: C blocks of S tokens each, in bytes; values likewise.
        sequences: those of few tokens, and the others.
        sinks: positions from the first on that are seen in spite of the window.
    """
    tokens, heads, dim = q_TNH.shape
    kv_heads, size = keys_CKSR.shape[1:3]
    out_TNH = torch.empty((tokens, heads, dim), dtype=q_TNH.dtype, device=q_TNH.device)
    plain = rows.kind in ("fp32", "bf16")
    kept = [x.view(q_TNH.dtype) if plain else x for x in (keys_CKSR, values_CKSR)]
    scales = kept if plain else [x.view(torch.bfloat16) for x in kept]
    wide = max(16, triton.next_power_of_2(dim))
    for where in sequences:
        count, most = where.tables_BM.shape
        at_once = _MOST_ROWS
        if where.queries <= FEW:
            at_once = min(_MOST_ROWS, max(16, triton.next_power_of_2(where.queries * (heads // kv_heads))))
        tiles = triton.cdiv(where.queries * (heads // kv_heads), at_once)
        parts = 1
        if where.queries <= FEW:
            parts = min(_MOST_PARTS, max(1, _PROGRAMS // (count * tiles * kv_heads)), triton.cdiv(most * size, _KEYS))
        shape = (count, where.queries, heads, parts)
        found = torch.empty((*shape, dim) if parts > 1 else (1,), dtype=torch.float32, device=q_TNH.device)
        logs = torch.empty(shape if parts > 1 else (1,), dtype=torch.float32, device=q_TNH.device)
        _attend[(count * tiles, kv_heads, parts)](
            q_TNH, *kept, *scales, where.tables_BM, where.starts_B, where.lengths_B, where.begins_B, out_TNH, found, logs,
            scale, softcap or 0.0, window or 0, sinks, q_TNH.stride(0), most, tiles, parts, where.queries,
            KIND="plain" if plain else rows.kind, HEADS=heads, KV=kv_heads, DIM=dim, GROUP=rows.group, SIZE=size, ROW=kept[0].shape[-1],
            ROWS=at_once, WIDE=wide, BLOCK=_KEYS, DIVIDED=parts > 1, CAPPED=softcap is not None,
            WINDOW=window is not None, SINKS=sinks > 0, num_warps=4, num_stages=2,
        )  # fmt: skip
        if parts > 1:
            _put_together[(count, where.queries, heads)](
                found, logs, where.lengths_B, where.begins_B, out_TNH, parts, where.queries,
                HEADS=heads, DIM=dim, WIDE=wide, MOST=_MOST_PARTS, num_warps=2,
            )  # fmt: skip
    return out_TNH
