"""Attention to keys and values in blocks, on GPUs, which are read where they are and as they are kept.

Shape suffixes as in :mod:`fw.kernels.attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fw.kernels import gpu
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
    kernels = gpu.kernels("attention", q_TNH)
    tokens, heads, dim = q_TNH.shape
    kv_heads, size = keys_CKSR.shape[1:3]
    out_TNH = torch.empty((tokens, heads, dim), dtype=q_TNH.dtype, device=q_TNH.device)
    plain = rows.kind in ("fp32", "bf16", "fp16")
    kept = [x.view(q_TNH.dtype) if plain else x for x in (keys_CKSR, values_CKSR)]
    scales = kept if plain else [x.view(torch.bfloat16) for x in kept]
    wide = max(16, gpu.power_of_two(dim))
    for where in sequences:
        count, most = where.tables_BM.shape
        at_once = _MOST_ROWS
        if where.queries <= FEW:
            at_once = min(_MOST_ROWS, max(16, gpu.power_of_two(where.queries * (heads // kv_heads))))
        tiles = gpu.parts(where.queries * (heads // kv_heads), at_once)
        parts = 1
        if where.queries <= FEW:
            parts = min(_MOST_PARTS, max(1, _PROGRAMS // (count * tiles * kv_heads)), gpu.parts(most * size, _KEYS))
        shape = (count, where.queries, heads, parts)
        found = torch.empty((*shape, dim) if parts > 1 else (1,), dtype=torch.float32, device=q_TNH.device)
        logs = torch.empty(shape if parts > 1 else (1,), dtype=torch.float32, device=q_TNH.device)
        kernels.attend[(count * tiles, kv_heads, parts)](
            q_TNH, *kept, *scales, where.tables_BM, where.starts_B, where.lengths_B, where.begins_B, out_TNH, found, logs,
            scale, softcap or 0.0, window or 0, sinks, q_TNH.stride(0), most, tiles, parts, where.queries,
            KIND="plain" if plain else rows.kind, HEADS=heads, KV=kv_heads, DIM=dim, GROUP=rows.group, SIZE=size, ROW=kept[0].shape[-1],
            ROWS=at_once, WIDE=wide, BLOCK=_KEYS, DIVIDED=parts > 1, CAPPED=softcap is not None,
            WINDOW=window is not None, SINKS=sinks > 0, num_warps=4, num_stages=2,
        )  # fmt: skip
        if parts > 1:
            kernels.put_together[(count, where.queries, heads)](
                found, logs, where.lengths_B, where.begins_B, out_TNH, parts, where.queries,
                HEADS=heads, DIM=dim, WIDE=wide, MOST=_MOST_PARTS, num_warps=2,
            )  # fmt: skip
    return out_TNH
