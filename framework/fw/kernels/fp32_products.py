"""Products of matrices in fp32 by a kernel of fw's own, in place of torch's where these are known to take much longer: the library that
torch has for them leaves half of AVX-512 unused on AMD's processors.

What asks for a product stays as it is, forward, backward and compiled: torch's dispatcher has another kernel for the CPU meanwhile. The
processor decides, and no clock, so that ranks of one kind, and a run that goes on, compute alike.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from fw.kernels.build import library
from fw.kernels.calls import Kernel
from fw.kernels.matrix import Product
from fw.kernels.of_cpu import wanted

_PRODUCT = Kernel("fw_product_fp32", [ctypes.c_void_p])
_LEAST, _LEAST_SIDE = 1 << 25, 4
"""Multiplications of a product, and rows and columns of its result, from which on ours computes it: torch's of fewer is over before ours
has been called from Python, and packs nothing for a single row."""
_changing = threading.Lock()


class _Taken:
    times: ClassVar[int] = 0
    library: ClassVar[torch.library.Library | None] = None
    kernels: ClassVar[list[Any]] = []
    """Of all times: a thread may still be about to call what has been taken back."""


@contextmanager
def in_place_of_torch() -> Iterator[None]:
    """Products of large matrices in fp32 on the CPU are by this kernel meanwhile, in all threads, where that is faster.

    All others are called by way of Python and with its lock, so it is for programs that compute in fp32. Other threads had better multiply
    nothing in the moments in which it begins and ends: torch's dispatcher is read without a lock.
    """
    if not (wanted() and _pays()):
        yield
        return
    with _changing:
        if _Taken.library is None:
            _Taken.library = _registered()
        _Taken.times += 1
    try:
        yield
    finally:
        with _changing:
            _Taken.times -= 1
            if not _Taken.times:
                _Taken.library._destroy()
                _Taken.library = None


def multiplied(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """``a · b``, matrices of any kind, by what would compute it in a run on their device."""
    return _product(a_MK, b_KN) if a_MK.is_cpu and _takes(a_MK, b_KN) and wanted() and _pays() else a_MK @ b_KN


def _product(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    return _compute(a_MK.new_empty((a_MK.shape[0], b_KN.shape[1])), a_MK, b_KN)


@functools.cache
def _pays() -> bool:
    """Whether this is a processor where it takes less time than torch's."""
    if not hasattr(torch.library, "get_kernel"):  # as in torch 2.11: what is replaced could not be called
        return False
    return torch.backends.mkl.is_available() and _PRODUCT.available and bool(library().fw_products_of_fp32_pay())


def _registered() -> torch.library.Library:
    made = torch.library.Library("aten", "IMPL")
    of_torch = {name: torch.library.get_kernel(f"aten::{name}", "CPU") for name in ("mm", "mm.out", "addmm", "addmm.out")}

    def mm(keys: Any, a_MK: Tensor, b_KN: Tensor) -> Tensor:
        if not _takes(a_MK, b_KN):
            return of_torch["mm"].call_boxed(keys, a_MK, b_KN)
        return _product(a_MK, b_KN)

    def mm_out(keys: Any, a_MK: Tensor, b_KN: Tensor, *, out: Tensor) -> Tensor:
        if not (_takes(a_MK, b_KN) and _fits(out, a_MK, b_KN)):
            return of_torch["mm.out"].call_boxed(keys, a_MK, b_KN, out=out)
        return _compute(out, a_MK, b_KN)

    def addmm(keys: Any, x: Tensor, a_MK: Tensor, b_KN: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
        if beta != 1 or alpha != 1 or x.dtype != torch.float32 or not _takes(a_MK, b_KN):
            return of_torch["addmm"].call_boxed(keys, x, a_MK, b_KN, beta=beta, alpha=alpha)
        return _added(a_MK.new_empty((a_MK.shape[0], b_KN.shape[1])), x, a_MK, b_KN)

    def addmm_out(keys: Any, x: Tensor, a_MK: Tensor, b_KN: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Tensor) -> Tensor:
        ours = beta == 1 and alpha == 1 and x.dtype == torch.float32 and _takes(a_MK, b_KN)
        if not (ours and (_fits(out, a_MK, b_KN) if out is x else _fits(out, a_MK, b_KN, x))):
            return of_torch["addmm.out"].call_boxed(keys, x, a_MK, b_KN, beta=beta, alpha=alpha, out=out)
        return _added(out, x, a_MK, b_KN)

    kernels: dict[str, Callable[..., Tensor]] = {"mm": mm, "mm.out": mm_out, "addmm": addmm, "addmm.out": addmm_out}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        for name, kernel in kernels.items():
            made.impl(name, _disable_dynamo(kernel), "CPU", with_keyset=True)
    _Taken.kernels += [torch.library.get_kernel(f"aten::{name}", "CPU") for name in kernels]
    return made


def _takes(a_MK: Tensor, b_KN: Tensor) -> bool:
    if a_MK.dtype != torch.float32 or b_KN.dtype != torch.float32 or a_MK.dim() != 2 or b_KN.dim() != 2:
        return False
    (rows, inner), (inner_of_b, columns) = a_MK.shape, b_KN.shape
    if rows * inner * columns < _LEAST or min(rows, columns) < _LEAST_SIDE or inner != inner_of_b:
        return False
    return _in_lines(a_MK) and _in_lines(b_KN)


def _in_lines(x: Tensor) -> bool:
    """Whether its rows or its columns lie one behind another, each by itself."""
    (rows, columns), (row, column) = x.shape, x.stride()
    return x.layout is torch.strided and ((column == 1 and row >= columns) or (row == 1 and column >= rows))


def _fits(out: Tensor, *given: Tensor) -> bool:
    """Whether it can be written while what is multiplied is read; torch says what else is wrong with it."""
    apart = all(out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() for x in given)
    return apart and out.dtype == torch.float32 and out.shape == (given[0].shape[0], given[1].shape[1]) and out.is_contiguous()


def _added(out: Tensor, x: Tensor, a_MK: Tensor, b_KN: Tensor) -> Tensor:
    if out is not x:
        out.copy_(x.expand_as(out))
    return _compute(out, a_MK, b_KN, add=True)


def _compute(c_MN: Tensor, a_MK: Tensor, b_KN: Tensor, *, add: bool = False) -> Tensor:
    of = Product.of(c_MN, a_MK, b_KN, add=add)  # there until it has been read
    _PRODUCT(ctypes.addressof(of))
    return c_MN
