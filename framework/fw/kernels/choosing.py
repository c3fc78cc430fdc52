"""What stands between a head and a token, on the CPU: numbers widened, and the largest of many."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fw.kernels.calls import Kernel

_LARGEST = Kernel("fw_largest", [ctypes.c_void_p] * 3 + [ctypes.c_long] * 2)
_WIDEN = Kernel("fw_widen_bf16", [ctypes.c_void_p] * 2 + [ctypes.c_long])


def largest(x_RV: Tensor) -> tuple[Tensor, Tensor]:
    """The largest number of each row ``[R]``, the first place where it is ``[R]``; NaN where there is any, as ``x_RV.max(-1)`` has it.

    The kernel's threads have just computed the numbers; torch's would have to be woken for each operator.
    """
    if not (x_RV.is_cpu and type(x_RV) is Tensor and x_RV.dtype == torch.float32 and x_RV.is_contiguous() and x_RV.numel()):
        return x_RV.max(-1)
    if x_RV.shape[-1] >= 1 << 31 or not _LARGEST.available:
        return x_RV.max(-1)
    best_R, where_R = x_RV.new_empty(len(x_RV)), torch.empty(len(x_RV), dtype=torch.int64)
    _LARGEST(x_RV.data_ptr(), best_R.data_ptr(), where_R.data_ptr(), *x_RV.shape)
    return best_R, where_R


def widen(x: Tensor, out: Tensor) -> bool:
    """``x`` in bfloat16 into ``out`` in fp32; False, and nothing is done, where they are something else."""
    if x.dtype != torch.bfloat16 or out.dtype != torch.float32 or x.shape != out.shape or not x.is_cpu or not _WIDEN.available:
        return False
    if not (x.is_contiguous() and out.is_contiguous()):
        return False
    _WIDEN(x.data_ptr(), out.data_ptr(), x.numel())
    return True
