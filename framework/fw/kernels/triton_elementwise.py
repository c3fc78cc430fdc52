"""Norms, rotation, gates, and the keeping of keys and values, in Triton, which only a machine with a GPU has.

Numbers are rounded where torch's operators of the same names round them. Shape suffixes as in :mod:`fw.kernels.attention`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm(x, weight, y, size, eps, SHIFTED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, BLOCK)
    inside = at < size
    x_D = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    w_D = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    y_D = x_D * (1 / tl.sqrt(tl.sum(x_D * x_D, 0) / size + eps))
    kind = y.dtype.element_ty
    y_D = y_D * (1 + w_D) if SHIFTED else y_D.to(kind).to(tl.float32) * w_D
    tl.store(y + row + at, y_D.to(kind), mask=inside)


@triton.jit
def rotate(x, cos, sin, y, x_step, heads, HALF: tl.constexpr, BLOCK: tl.constexpr):
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


@triton.jit
def silu_mul(gate, up, y, size, gate_step, up_step, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    g = tl.load(gate + row * gate_step + at, mask=inside).to(tl.float32)
    u = tl.load(up + row * up_step + at, mask=inside).to(tl.float32)
    kind = y.dtype.element_ty
    gated = (g / (1 + tl.exp(-g))).to(kind).to(tl.float32)
    tl.store(y + row * size + at, (gated * u).to(kind), mask=inside)


@triton.jit
def keep(k, v, slots, keys, values, k_step, v_step, row, size, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    if slot >= 0:
        at = tl.arange(0, BLOCK)
        inside = at < row
        to = ((slot // size * HEADS + head) * size + slot % size) * row + at
        tl.store(keys + to, tl.load(k + token * k_step + head * row + at, mask=inside), mask=inside)
        tl.store(values + to, tl.load(v + token * v_step + head * row + at, mask=inside), mask=inside)
