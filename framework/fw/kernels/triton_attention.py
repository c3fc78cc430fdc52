"""Attention to keys and values in blocks, in Triton, which only a machine with a GPU has.

Where a sequence has few tokens its keys are divided among programs, whose results are put together by a second kernel (Flash-Decoding, Dao
et al. 2023, https://crfm.stanford.edu/2023/10/12/flashdecoding.html). Shape suffixes as in :mod:`fw.kernels.attention`.

A kernel is compiled anew, for half a second, for each other value of what it knows when it is compiled: that is what stays with a model,
and nothing that comes with a step.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
def attend(
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
    first = start * 0
    if WINDOW:
        first = tl.maximum(0, start + first_query - window + 1)
    # What is between sinks and window is not looked at: the blocks with sinks come first, and then the window's.
    near = start * 0
    if SINKS:
        near = tl.cdiv(tl.minimum(first, sinks), BLOCK) * BLOCK
    looked_at = tl.where(first_query < length, near + total - first, 0)
    each = tl.cdiv(tl.cdiv(looked_at, BLOCK), part_count) * BLOCK
    low = part * each
    high = tl.minimum(looked_at, low + each)
    most_M = tl.full([ROWS], -float("inf"), tl.float32)
    sum_M = tl.zeros([ROWS], tl.float32)
    acc_MH = tl.zeros([ROWS, WIDE], tl.float32)
    for at in range(low, high, BLOCK):
        nth_N = at + tl.arange(0, BLOCK)
        pos_N = nth_N + first
        there_N = nth_N < high
        if SINKS:
            pos_N = tl.where(nth_N < near, nth_N, pos_N - near)
            there_N = there_N & ((nth_N >= near) | (pos_N < tl.minimum(first, sinks)))
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
def put_together(
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
