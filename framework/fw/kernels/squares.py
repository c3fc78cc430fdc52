"""Sums of squares on the CPU: of gradients, for their norm."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from fw.kernels.calls import Kernel
from fw.kernels.of_cpu import DTYPES, of_cpu, wanted

_SQUARES = Kernel("fw_squares", [ctypes.c_void_p] + [ctypes.c_long] * 2 + [ctypes.c_void_p])


def available() -> bool:
    """Whether there is such a kernel on this machine."""
    return wanted() and _SQUARES.available


def takes(x: Tensor) -> bool:
    """Whether :func:`square_sum` takes it."""
    return x.dtype in DTYPES and torch.ops.aten.is_non_overlapping_and_dense(x) and of_cpu(x) and available()


def square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Of all numbers of all of these, a scalar in fp64."""
    found: Tensor = torch.ops.fw.square_sum(list(tensors))
    return found


@torch.library.custom_op("fw::square_sum", mutates_args=())
def _square_sum(tensors: Sequence[Tensor]) -> Tensor:
    sums = (ctypes.c_double * len(tensors))()
    for at, x in enumerate(tensors):
        _SQUARES(x.data_ptr(), x.dtype == torch.bfloat16, x.numel(), ctypes.addressof(sums) + 8 * at)
    return torch.tensor(sum(sums), dtype=torch.float64)


@_square_sum.register_fake
def _(tensors: Sequence[Tensor]) -> Tensor:
    return torch.empty((), dtype=torch.float64)
