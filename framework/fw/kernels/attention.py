"""Attention of tokens to keys and values in blocks, which are read where they are and as they are kept.

What a token gets does not depend on which others are computed with it, to the last bit.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fw.kernels.calls import Kernel
from fw.planned import planned_gpu

Kind = Literal["fp32", "bf16", "fp16", "int8", "int4"]
_KINDS: dict[str, int] = {"fp32": 0, "bf16": 1, "int8": 2, "int4": 3}
_COMPUTED = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Rows:
    """How the keys or values of a head and a token are kept: a row of bytes.

    Attributes:
        kind: plain numbers, or codes with scales in bfloat16 behind them.
        dim: numbers.
        group: of how many codes each has scales; ``dim`` where there are none. For int8 a multiple of 16, or all; for int4 a divisor of
            half of them.
    """

    kind: Kind
    dim: int
    group: int

    @property
    def bytes(self) -> int:
        """Of a row: int8 has a scale for each group, int4 a step and a smallest number."""
        groups = self.dim // self.group
        if self.kind == "int8":
            return self.dim + 2 * groups
        if self.kind == "int4":
            return self.dim // 2 + 4 * groups
        return (4 if self.kind == "fp32" else 2) * self.dim


_ATTEND = Kernel("fw_attend", [ctypes.c_void_p] * 7 + [ctypes.c_long] * 12 + [ctypes.c_float] * 2)
_KEEP = Kernel("fw_keep", [ctypes.c_void_p] * 3 + [ctypes.c_long] * 8)


def available(computed: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels can be had on this machine for queries, keys and values that are computed so."""
    return computed in _COMPUTED and device.type == "cpu" and planned_gpu() is None and _ATTEND.available


def keep(x_TKH: Tensor, slots_T: Tensor, kept_CKSR: Tensor, rows: Rows) -> None:
    """Write keys or values to their slots.

    Args:
        slots_T: int64; a slot's number is that of its block times S, and its place in the block.
        kept_CKSR: C blocks, of S tokens each; ``rows.bytes`` bytes of each head and token.
    """
    x_TKH = x_TKH.contiguous()
    tokens, heads, dim = x_TKH.shape
    _KEEP(
        x_TKH.data_ptr(),
        slots_T.data_ptr(),
        kept_CKSR.data_ptr(),
        x_TKH.dtype == torch.bfloat16,
        _KINDS[rows.kind],
        tokens,
        heads,
        dim,
        rows.group,
        rows.bytes,
        kept_CKSR.shape[2],
    )


def attend_blocks(
    q_TNH: Tensor,
    keys_CKSR: Tensor,
    values_CKSR: Tensor,
    rows: Rows,
    tables_BM: Tensor,
    starts_B: Tensor,
    lengths_B: Tensor,
    *,
    window: int | None,
    sinks: int = 0,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """``[T, N, H]`` of the tokens of B sequences, which lie one behind another and are the last of their sequences.

    Args:
        keys_CKSR: C blocks of S tokens each; values likewise.
        tables_BM: int32; blocks of each sequence, in order. Blocks of positions that nobody sees may be any number.
        starts_B: int32; position of each sequence's first token here; ``lengths_B`` how many there are.
        sinks: positions from the first on that are seen in spite of the window.
    """
    q_TNH = q_TNH.contiguous()
    out_TNH = torch.empty_like(q_TNH)
    _, heads, dim = q_TNH.shape
    _ATTEND(
        q_TNH.data_ptr(),
        keys_CKSR.data_ptr(),
        values_CKSR.data_ptr(),
        tables_BM.data_ptr(),
        starts_B.data_ptr(),
        lengths_B.data_ptr(),
        out_TNH.data_ptr(),
        q_TNH.dtype == torch.bfloat16,
        _KINDS[rows.kind],
        len(starts_B),
        heads,
        keys_CKSR.shape[1],
        dim,
        rows.group,
        rows.bytes,
        keys_CKSR.shape[2],
        tables_BM.shape[1],
        window or 0,
        sinks,
        scale,
        softcap or 0.0,
    )
    return out_TNH
