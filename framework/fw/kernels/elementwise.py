"""Norms, rotation and gates in one pass each, for a model that generates: on the CPU in bfloat16, on GPUs in 16 bits.

Each gives None where it does not apply: outside of ``torch.inference_mode()``, within ``torch.compile``,
on other devices and dtypes, or without a compiler (on GPUs, Triton).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fw.kernels import gpu
from fw.kernels.calls import Kernel
from fw.planned import on_gpu, planned_gpu

_LANES = 16
_PLAIN = (Tensor, nn.Parameter)
_RMS_NORM = Kernel("fw_rms_norm_bf16", [ctypes.c_void_p] * 3 + [ctypes.c_long] * 2 + [ctypes.c_float, ctypes.c_long])
_ROTATE = Kernel("fw_rotate_bf16", [ctypes.c_void_p] * 4 + [ctypes.c_long] * 3)
_SILU_MUL = Kernel("fw_silu_mul_bf16", [ctypes.c_void_p] * 3 + [ctypes.c_long])
_ADD = Kernel("fw_add_bf16", [ctypes.c_void_p] * 3 + [ctypes.c_long])
_ADD_RMS_NORM = Kernel("fw_add_rms_norm_bf16", [ctypes.c_void_p] * 5 + [ctypes.c_long] * 2 + [ctypes.c_float, ctypes.c_long])


def _generating() -> bool:
    # torch.compile cannot trace the question for the mode; it fuses these by itself.
    return not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()


def applies(*tensors: Tensor) -> bool:
    """Whether these are what the kernels take, where there are kernels."""
    return _on_cpu(*tensors) or _on_gpu(*tensors)


def _on_cpu(*tensors: Tensor) -> bool:
    plain = _generating() and all(type(x) in _PLAIN and x.dtype == torch.bfloat16 and x.is_cpu and x.is_contiguous() for x in tensors)
    return plain and planned_gpu() is None


def _on_gpu(*tensors: Tensor) -> bool:
    return _generating() and on_gpu(tensors[0]) and all(type(x) in _PLAIN for x in tensors) and gpu.takes(*tensors)


def rms_norm(x_D: Tensor, weight_D: Tensor, eps: float, *, shifted: bool = False) -> Tensor | None:
    """``x / sqrt(mean(x²) + eps) · weight`` over the last dimension, ``1 + weight`` where shifted; ``[…, D]``."""
    if _on_gpu(x_D, weight_D):
        found_D: Tensor = gpu.elementwise().rms_norm(x_D, weight_D, eps, shifted)
        return found_D
    if not _on_cpu(x_D, weight_D) or x_D.shape[-1] % _LANES or not _RMS_NORM.available:
        return None
    y_D = torch.empty_like(x_D)
    size = x_D.shape[-1]
    _RMS_NORM(x_D.data_ptr(), weight_D.data_ptr(), y_D.data_ptr(), x_D.numel() // size, size, eps, shifted)
    return y_D


def rotate(x_1NTH: Tensor, cos_11TH: Tensor, sin_11TH: Tensor) -> Tensor | None:
    """Pairs ``(x_i, x_{i+H/2})`` turned, of one row of tokens; angles in fp32."""
    if not _generating() or len(x_1NTH) != 1 or not (cos_11TH.is_contiguous() and sin_11TH.is_contiguous()):
        return None
    x_TNH = x_1NTH[0].transpose(0, 1)
    if cos_11TH.dtype == torch.float32 and _on_gpu(x_TNH):
        turned_TNH: Tensor = gpu.elementwise().rotate(x_TNH, cos_11TH, sin_11TH)
        return turned_TNH.transpose(0, 1)[None]
    if not _on_cpu(x_TNH) or cos_11TH.dtype != torch.float32 or not _ROTATE.available:
        return None
    y_TNH = torch.empty_like(x_TNH)
    tokens, heads, size = x_TNH.shape
    _ROTATE(x_TNH.data_ptr(), cos_11TH.data_ptr(), sin_11TH.data_ptr(), y_TNH.data_ptr(), tokens, heads, size // 2)
    return y_TNH.transpose(0, 1)[None]


def silu_mul(gate: Tensor, up: Tensor) -> Tensor | None:
    """``silu(gate) · up``."""
    if gate.shape == up.shape and _on_gpu(gate, up):
        gated: Tensor = gpu.elementwise().silu_mul(gate, up)
        return gated
    if not _on_cpu(gate, up) or gate.shape != up.shape or not _SILU_MUL.available:
        return None
    y = torch.empty_like(gate)
    _SILU_MUL(gate.data_ptr(), up.data_ptr(), y.data_ptr(), gate.numel())
    return y


def add(x: Tensor, y: Tensor, out: Tensor) -> bool:
    """``x + y``, to the bit as torch computes it, into ``out``; False, and nothing is done, where it does not apply."""
    if not _on_cpu(x, y, out) or not x.shape == y.shape == out.shape or not _ADD.available:
        return False
    _ADD(x.data_ptr(), y.data_ptr(), out.data_ptr(), x.numel())
    return True


Call = tuple[Kernel, Sequence[int]]
"""A kernel, and what it is given as words."""


def at_once(first: Call, second: Call) -> Call | None:
    """One call that does what these two do, one after the other, where there is such a kernel: a sum, and the norm of it."""
    if first[0] is not _ADD or second[0] is not _RMS_NORM:
        return None
    (x, y, z, count), (of, *rest) = first[1], second[1]
    rows, size = rest[2:4]
    return (_ADD_RMS_NORM, (x, y, z, *rest)) if of == z and rows * size == count else None
