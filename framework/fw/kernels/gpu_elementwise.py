"""Norms, rotation, gates, and the keeping of keys and values, in one kernel each, on GPUs.

Numbers are rounded where torch's operators of the same names round them. Shape suffixes as in :mod:`fw.kernels.attention`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_PART = 1024
"""Numbers that a program of an elementwise kernel computes."""


@triton.jit
def _rms_norm(x, weight, y, size, eps, SHIFTED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, BLOCK)
    inside = at < size
    x_D = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    w_D = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    y_D = x_D * (1 / tl.sqrt(tl.sum(x_D * x_D, 0) / size + eps))
    kind = y.dtype.element_ty
    y_D = y_D * (1 + w_D) if SHIFTED else y_D.to(kind).to(tl.float32) * w_D
    tl.store(y + row + at, y_D.to(kind), mask=inside)


def rms_norm(x_D: Tensor, weight_D: Tensor, eps: float, shifted: bool) -> Tensor:
    """``x / sqrt(mean(x²) + eps) · weight`` over the last dimension, ``1 + weight`` where shifted; ``[…, D]``."""
    x_D = x_D.contiguous()
    y_D = torch.empty_like(x_D)
    size = x_D.shape[-1]
    if x_D.numel():
        block = triton.next_power_of_2(size)
        warps = min(16, max(1, block // 512))
        _rms_norm[(x_D.numel() // size,)](x_D, weight_D, y_D, size, eps, SHIFTED=shifted, BLOCK=block, num_warps=warps)
    return y_D


@triton.jit
def _rotate(x, cos, sin, y, x_step, heads, HALF: tl.constexpr, BLOCK: tl.constexpr):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < HALF
    low, high = x + token * x_step + head * 2 * HALF + at, x + token * x_step + head * 2 * HALF + HALF + at
    a, b = tl.load(low, mask=inside).to(tl.float32), tl.load(high, mask=inside).to(tl.float32)
    angles = token * 2 * HALF + at
    to = y + (token * heads + head) * 2 * HALF + at
    kind = y.dtype.element_ty
    tl.store(to, (a * tl.load(cos + angles, mask=inside) - b * tl.load(sin + angles, mask=inside)).to(kind), mask=inside)
    turned = b * tl.load(cos + HALF + angles, mask=inside) + a * tl.load(sin + HALF + angles, mask=inside)
    tl.store(to + HALF, turned.to(kind), mask=inside)


def rotate(x_TNH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Pairs ``(x_i, x_{i+H/2})`` turned; angles in fp32."""
    tokens, heads, size = x_TNH.shape
    x_TNH = x_TNH if x_TNH.stride(1) == size else x_TNH.contiguous()
    y_TNH = torch.empty((tokens, heads, size), dtype=x_TNH.dtype, device=x_TNH.device)
    if x_TNH.numel():
        block = triton.next_power_of_2(size // 2)
        _rotate[(tokens, heads)](x_TNH, cos_TH, sin_TH, y_TNH, x_TNH.stride(0), heads, HALF=size // 2, BLOCK=block, num_warps=1)
    return y_TNH


@triton.jit
def _silu_mul(gate, up, y, size, gate_step, up_step, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    g = tl.load(gate + row * gate_step + at, mask=inside).to(tl.float32)
    u = tl.load(up + row * up_step + at, mask=inside).to(tl.float32)
    kind = y.dtype.element_ty
    gated = (g / (1 + tl.exp(-g))).to(kind).to(tl.float32)
    tl.store(y + row * size + at, (gated * u).to(kind), mask=inside)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) · up`` of rows ``[…, F]``; of ``[1, T, F]`` they may lie apart."""
    if gate.dim() != 3 or len(gate) != 1:
        gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    size = gate.shape[-1]
    if y.numel():
        steps = (gate.stride(-2), up.stride(-2)) if gate.dim() > 1 else (0, 0)
        _silu_mul[(y.numel() // size, triton.cdiv(size, _PART))](gate, up, y, size, *steps, BLOCK=_PART)
    return y


@triton.jit
def _keep(k, v, slots, keys, values, k_step, v_step, row, size, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    if slot >= 0:
        at = tl.arange(0, BLOCK)
        inside = at < row
        to = ((slot // size * HEADS + head) * size + slot % size) * row + at
        tl.store(keys + to, tl.load(k + token * k_step + head * row + at, mask=inside), mask=inside)
        tl.store(values + to, tl.load(v + token * v_step + head * row + at, mask=inside), mask=inside)


def keep(k_TKR: Tensor, v_TKR: Tensor, slots_T: Tensor, keys_CKSR: Tensor, values_CKSR: Tensor) -> None:
    """Write keys and values, as they are kept, to their slots; below 0 is none.

    Args:
        slots_T: int64; a slot's number is that of its block times S, and its place in the block.
        keys_CKSR: C blocks, of S tokens each; of the same dtype as the rows.
    """
    tokens, heads, row = k_TKR.shape
    size = keys_CKSR.shape[2]
    if tokens:
        block: Any = triton.next_power_of_2(row)
        steps = (k_TKR.stride(0), v_TKR.stride(0))
        grid = (tokens, heads)
        _keep[grid](k_TKR, v_TKR, slots_T, keys_CKSR, values_CKSR, *steps, row, size, HEADS=heads, BLOCK=block, num_warps=1)
