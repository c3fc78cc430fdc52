"""Products of matrices in fp32 by a kernel of fw's own, in place of torch's where these take much longer: the library that torch has for
them leaves half of AVX-512 unused on processors that are not its maker's.

What asks for a product stays as it is, forward, backward and compiled: torch's dispatcher has another kernel for the CPU meanwhile.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fw.kernels.build import library
from fw.kernels.calls import Kernel
from fw.kernels.matrix import Product
from fw.kernels.of_cpu import wanted
from fw.kernels.threads import alone

_PRODUCT = Kernel("fw_product_fp32", [ctypes.c_void_p])
_LEAST = 1 << 25
"""Multiplications of a product from which on ours computes it: torch's then takes longer than calling ours from Python does."""
_FASTER = 1.5
"""Times as fast as torch's it has to be. Processors are at twice or at once: what a run computes with does not hang on a measurement."""
_changing = threading.Lock()


class _Taken:
    times = 0
    library: torch.library.Library | None = None


def active() -> bool:
    """Whether it computes torch's products now."""
    return _Taken.library is not None


@contextmanager
def in_place_of_torch() -> Iterator[None]:
    """Products of large matrices in fp32 on the CPU are by this kernel meanwhile, in all threads, where that is faster."""
    if not (wanted() and _faster()):
        yield
        return
    with _changing:
        _Taken.times += 1
        if _Taken.library is None:
            _Taken.library = _registered()
    try:
        yield
    finally:
        with _changing:
            _Taken.times -= 1
            if not _Taken.times:
                _Taken.library._destroy()
                _Taken.library = None


@functools.cache
def _faster() -> bool:
    """Whether it is, on one thread: the least times of several products by each, in turns."""
    if not hasattr(torch.library, "get_kernel"):  # as in torch 2.11: what is replaced could not be called
        return False
    if not (_PRODUCT.available and library().fw_products_of_fp32_are_there()):
        return False
    a_MM = torch.zeros(512, 512)
    c_MM = torch.empty_like(a_MM)

    def seconds(multiply: Callable[[], object]) -> float:
        begin = time.perf_counter()
        multiply()
        return time.perf_counter() - begin

    with alone():
        taken = [(seconds(lambda: _compute(c_MM, a_MM, a_MM)), seconds(lambda: torch.mm(a_MM, a_MM, out=c_MM))) for _ in range(8)]
    ours, theirs = map(min, zip(*taken, strict=True))
    return theirs > _FASTER * ours


def _registered() -> torch.library.Library:
    made = torch.library.Library("aten", "IMPL")
    of_torch = {name: torch.library.get_kernel(f"aten::{name}", "CPU") for name in ("mm", "mm.out", "addmm", "addmm.out")}

    def mm(keys: Any, a_MK: Tensor, b_KN: Tensor) -> Tensor:
        if not _takes(a_MK, b_KN):
            return of_torch["mm"].call_boxed(keys, a_MK, b_KN)
        return _compute(a_MK.new_empty((a_MK.shape[0], b_KN.shape[1])), a_MK, b_KN)

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
            made.impl(name, kernel, "CPU", with_keyset=True)
    return made


def _takes(a_MK: Tensor, b_KN: Tensor) -> bool:
    if a_MK.dtype != torch.float32 or b_KN.dtype != torch.float32 or a_MK.dim() != 2 or b_KN.dim() != 2:
        return False
    (rows, inner), (inner_of_b, columns) = a_MK.shape, b_KN.shape
    return rows * inner * columns >= _LEAST and inner == inner_of_b and _in_lines(a_MK) and _in_lines(b_KN)


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
