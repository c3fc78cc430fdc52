"""Attention of one query of each sequence to keys and values in blocks, which are read where they are."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from fw.kernels.build import NotCompiled, library

_NAMES = {torch.float32: "fw_attend_f32", torch.bfloat16: "fw_attend_bf16"}


@functools.cache
def _function(dtype: torch.dtype) -> Callable[..., None]:
    function = getattr(library("attention"), _NAMES[dtype])
    function.restype = None
    function.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_long] * 7 + [ctypes.c_float] * 2
    return function


def available(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel can be had for such keys and values on this machine."""
    if dtype not in _NAMES or device.type != "cpu":
        return False
    try:
        _function(dtype)
    except NotCompiled:
        return False
    return True


def attend_blocks(
    q_BNH: Tensor,
    keys_SKH: Tensor,
    values_SKH: Tensor,
    tables_BM: Tensor,
    lengths_B: Tensor,
    *,
    block_size: int,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """``[B, N, H]`` of B queries, each the last position of its sequence.

    Args:
        keys_SKH: of S slots, ``block_size`` of them a block; values likewise.
        tables_BM: int32; blocks of each sequence, in order.
        lengths_B: int32; positions of each sequence.
    """
    q_BNH = q_BNH.contiguous()
    out_BNH = torch.empty_like(q_BNH)
    sequences, heads, dim = q_BNH.shape
    _function(q_BNH.dtype)(
        q_BNH.data_ptr(),
        keys_SKH.data_ptr(),
        values_SKH.data_ptr(),
        tables_BM.data_ptr(),
        lengths_B.data_ptr(),
        out_BNH.data_ptr(),
        sequences,
        heads,
        keys_SKH.shape[1],
        dim,
        block_size,
        tables_BM.shape[1],
        window or 0,
        scale,
        softcap or 0.0,
    )
    return out_BNH
