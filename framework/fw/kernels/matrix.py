"""Products of matrices in bfloat16 on processors with AMX, where torch's own take longer: of a turned factor, and with sums in fp32."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.flop_counter import mm_flop, register_flop_formula

from fw.kernels.build import library
from fw.kernels.calls import Kernel
from fw.kernels.of_cpu import DTYPES, of_cpu, wanted

_PRODUCT = Kernel("fw_product", [ctypes.c_void_p])
_SUMMED = 2048
"""As in matrix.cpp: what is summed over before sums are rounded to what is asked for."""


class Product(ctypes.Structure):
    """As in matrix_parts.h."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("a", "b", "c")),
        *((name, ctypes.c_long) for name in ("a_step", "b_step", "c_step", "rows", "columns", "inner")),
        *((name, ctypes.c_long) for name in ("a_turned", "b_turned", "b_half", "c_half", "add")),
    ]

    @classmethod
    def of(cls, c_MN: Tensor, a_MK: Tensor, b_KN: Tensor, *, add: bool) -> Product:
        """``c (+)= a · b``."""
        of = cls(rows=a_MK.shape[0], inner=a_MK.shape[1], columns=b_KN.shape[1], add=add)
        of.a, of.b, of.c = a_MK.data_ptr(), b_KN.data_ptr(), c_MN.data_ptr()
        of.a_turned, of.b_turned = _turned(a_MK), _turned(b_KN)
        of.a_step, of.b_step, of.c_step = a_MK.stride(of.a_turned), b_KN.stride(of.b_turned), c_MN.stride(0)
        of.b_half, of.c_half = b_KN.dtype == torch.bfloat16, c_MN.dtype == torch.bfloat16
        return of


class _Tiles:
    @functools.cached_property
    def here(self) -> bool:
        return _PRODUCT.available and bool(library().fw_products_are_there())


_tiles = _Tiles()


def available() -> bool:
    """Whether there is such a kernel on this machine. To be asked before a compiled block asks, which cannot compile it."""
    return wanted() and _tiles.here


def takes(a_MK: Tensor, b_KN: Tensor, dtype: torch.dtype) -> bool:
    """Whether :func:`product` gives ``a · b`` in this dtype."""
    if torch.compiler.is_compiling() or not of_cpu(a_MK, b_KN) or not available():
        return False
    if a_MK.dtype != torch.bfloat16 or b_KN.dtype not in DTYPES or dtype not in DTYPES or not a_MK.numel() * b_KN.numel():
        return False
    return (dtype == torch.float32 or a_MK.shape[1] <= _SUMMED) and 1 in a_MK.stride() and 1 in b_KN.stride()


def product(a_MK: Tensor, b_KN: Tensor, dtype: torch.dtype) -> Tensor:
    """``a · b`` of an a in bfloat16 and a b that is, or is rounded to it; rows or columns of each lie one behind another."""
    found: Tensor = torch.ops.fw.product(a_MK, b_KN, dtype == torch.bfloat16)
    return found


def add_product(sum_MN: Tensor, a_MK: Tensor, b_KN: Tensor, *, to_nothing: bool = False) -> None:
    """``sum += a · b``, rows of which lie one behind another.

    Args:
        to_nothing: the sum is this product; what it holds before does not matter.

    Raises:
        ValueError: columns of the sum lie so.
    """
    if sum_MN.stride(1) != 1:
        raise ValueError(f"add_product: a row of the sum lies {sum_MN.stride(1)} numbers apart")
    torch.ops.fw.add_product(sum_MN, a_MK, b_KN, to_nothing)


def _turned(x: Tensor) -> bool:
    return x.stride(1) != 1


@torch.library.custom_op("fw::product", mutates_args=())
def _product(a_MK: Tensor, b_KN: Tensor, half: bool) -> Tensor:
    c_MN = _product_room(a_MK, b_KN, half)
    _compute(c_MN, a_MK, b_KN, add=False)
    return c_MN


@_product.register_fake
def _product_room(a_MK: Tensor, b_KN: Tensor, half: bool) -> Tensor:
    return a_MK.new_empty((a_MK.shape[0], b_KN.shape[1]), dtype=torch.bfloat16 if half else torch.float32)


@torch.library.custom_op("fw::add_product", mutates_args=("sum_MN",))
def _add(sum_MN: Tensor, a_MK: Tensor, b_KN: Tensor, to_nothing: bool) -> None:
    _compute(sum_MN, a_MK, b_KN, add=not to_nothing)


@_add.register_fake
def _(sum_MN: Tensor, a_MK: Tensor, b_KN: Tensor, to_nothing: bool) -> None:
    return None


def _compute(c_MN: Tensor, a_MK: Tensor, b_KN: Tensor, *, add: bool) -> None:
    of = Product.of(c_MN, a_MK, b_KN, add=add)  # there until it has been read
    _PRODUCT(ctypes.addressof(of))


@register_flop_formula(torch.ops.fw.product)
def _product_flops(a: Sequence[int], b: Sequence[int], *_: Any, **__: Any) -> int:
    return int(mm_flop(a, b))


@register_flop_formula(torch.ops.fw.add_product)
def _add_flops(c: Sequence[int], a: Sequence[int], b: Sequence[int], *_: Any, **__: Any) -> int:
    return int(mm_flop(a, b))
