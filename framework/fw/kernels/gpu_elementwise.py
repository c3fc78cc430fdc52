"""Norms, rotation, gates, and the keeping of keys and values, in one kernel each, on GPUs.

Shape suffixes as in :mod:`fw.kernels.attention`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fw.kernels import gpu

_PART = 1024
"""Numbers that a program of an elementwise kernel computes."""


def _kernels(given: Tensor) -> Any:
    return gpu.kernels("elementwise", given)


def rms_norm(x_D: Tensor, weight_D: Tensor, eps: float, shifted: bool) -> Tensor:
    """``x / sqrt(mean(x²) + eps) · weight`` over the last dimension, ``1 + weight`` where shifted; ``[…, D]``."""
    x_D = x_D.contiguous()
    y_D = torch.empty_like(x_D)
    size = x_D.shape[-1]
    if x_D.numel():
        block = gpu.power_of_two(size)
        warps = min(16, max(1, block // 512))
        _kernels(x_D).rms_norm[(x_D.numel() // size,)](x_D, weight_D, y_D, size, eps, SHIFTED=shifted, BLOCK=block, num_warps=warps)
    return y_D


def rotate(x_TNH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Pairs ``(x_i, x_{i+H/2})`` turned; angles in fp32."""
    tokens, heads, size = x_TNH.shape
    x_TNH = x_TNH if x_TNH.stride(1) == size else x_TNH.contiguous()
    y_TNH = torch.empty((tokens, heads, size), dtype=x_TNH.dtype, device=x_TNH.device)
    if x_TNH.numel():
        block = gpu.power_of_two(size // 2)
        _kernels(x_TNH).rotate[(tokens, heads)](
            x_TNH, cos_TH, sin_TH, y_TNH, x_TNH.stride(0), heads, HALF=size // 2, BLOCK=block, num_warps=1
        )
    return y_TNH


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) · up`` of rows ``[…, F]``; of ``[1, T, F]`` they may lie apart."""
    if gate.dim() != 3 or len(gate) != 1:
        gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    size = gate.shape[-1]
    if y.numel():
        steps = (gate.stride(-2), up.stride(-2)) if gate.dim() > 1 else (0, 0)
        _kernels(gate).silu_mul[(y.numel() // size, gpu.parts(size, _PART))](gate, up, y, size, *steps, BLOCK=_PART)
    return y


def keep(k_TKR: Tensor, v_TKR: Tensor, slots_T: Tensor, keys_CKSR: Tensor, values_CKSR: Tensor) -> None:
    """Write keys and values, as they are kept, to their slots; below 0 is none.

    Args:
        slots_T: int64; a slot's number is that of its block times S, and its place in the block.
        keys_CKSR: C blocks, of S tokens each; of the same dtype as the rows.
    """
    tokens, heads, row = k_TKR.shape
    size = keys_CKSR.shape[2]
    if tokens:
        block = gpu.power_of_two(row)
        steps = (k_TKR.stride(0), v_TKR.stride(0))
        grid = (tokens, heads)
        _kernels(k_TKR).keep[grid](k_TKR, v_TKR, slots_T, keys_CKSR, values_CKSR, *steps, row, size, HEADS=heads, BLOCK=block, num_warps=1)
