"""What oneDNN takes to lay out the operands of products in 16 bits, on processors that multiply these.

It follows from blocks that oneDNN chooses by shapes, strides, threads and processor, and tells nobody: found out by such products of
zeros. It grows with the blocks and not with the product, to 1.7 MiB a thread of what was seen (AMD Zen 5, oneDNN of torch 2.13).

Where a processor has AVX-512 and no such products, oneDNN adds them up in fp32 beside the result, a whole matrix for each thread (seen with
``ONEDNN_MAX_CPU_ISA=AVX512_CORE``): of what takes longer than a moment to compute there it is known without.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import _disable_current_modes

from fw.kernels.of_cpu import multiplies
from fw.kernels.threads import alone
from fw.planning import elsewhere
from fw.training.out_of_memory import is_out_of_memory

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
_MOST_FLOPS = 1 << 37
"""Of a product that is computed as it is: a third of a second on two cores. Of a larger one no side is longer than ``_SIDE``."""
_MOST_NUMBERS = 1 << 27
"""Of operands and result together."""
_MOST_FLOPS_BESIDE = 1 << 28
"""Of a product that is computed on a processor that has none of the kind."""
_SIDE = 4096
_LITTLE = 256
_MATRICES = 4

_Laid = tuple[tuple[int, ...], tuple[int, ...]]


def packed(given: Sequence[Tensor], dtype: torch.dtype, threads: int) -> list[int]:
    """Bytes of it, of a product on the CPU.

    Args:
        given: what the operator takes; the last two are multiplied: ``[…, M, K]`` and ``[…, K, N]``.
        dtype: of the result.
        threads: that compute it.
    """
    if not multiplies(dtype) or any(tensor.dtype != dtype or not tensor.numel() for tensor in given):
        return []
    a, b = ((tuple(tensor.shape), tuple(tensor.stride())) for tensor in given[-2:])
    (*matrices, m, k), n = a[0], b[0][-1]
    count = matrices[0] if matrices else 1
    if 2 * count * m * n * k > _MOST_FLOPS_BESIDE and (more := _beside(dtype)) is not None:
        return [4 * m * n * min(count, threads) + more]
    try:
        nbytes = _found_out(*_of_a_size(a, b), dtype, threads)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        nbytes = _found_out(*_smaller(a, b), dtype, threads)
    return [nbytes] if nbytes else []


@functools.cache
def _beside(dtype: torch.dtype) -> int | None:
    """What there is besides a matrix in fp32 for each thread, where these are: a small product tells. None where the processor has such
    products."""
    side = (_LITTLE, _LITTLE)
    more = _found_out((side, (_LITTLE, 1)), (side, (_LITTLE, 1)), dtype, 1) - 4 * _LITTLE**2
    return more if more >= 0 else None


def _of_a_size(a: _Laid, b: _Laid) -> tuple[_Laid, _Laid]:
    """The product, or a smaller one."""
    (*matrices, m, k), n = a[0], b[0][-1]
    count = matrices[0] if matrices else 1
    if 2 * count * m * n * k <= _MOST_FLOPS and count * (m * k + k * n + m * n) <= _MOST_NUMBERS:
        return a, b
    return _smaller(a, b)


def _smaller(a: _Laid, b: _Laid) -> tuple[_Laid, _Laid]:
    """A product that takes as much: of fewer matrices, no side of which is long."""
    (*matrices, m, k), n = a[0], b[0][-1]
    count = matrices[0] if matrices else 1
    few = [min(count, _MATRICES + count % 2)] if matrices else []  # an odd number is divided among threads otherwise
    m, n, k = (min(size, _SIDE) for size in (m, n, k))
    return _dense((*few, m, k), a[1]), _dense((*few, k, n), b[1])


def _dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> _Laid:
    """Without gaps, rows or columns first as ``strides`` have it."""
    *matrices, rows, columns = shape
    inner = (columns, 1) if strides[-1] == 1 else (1, rows)
    return shape, (*(rows * columns for _ in matrices), *inner)


@functools.cache
def _found_out(a: _Laid, b: _Laid, dtype: torch.dtype, threads: int) -> int:
    # A profiler within another one would end that, and have its events.
    busy = torch._C._autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled
    return elsewhere.computed(measured, a, b, dtype, threads) if busy else measured(a, b, dtype, threads)


def measured(a: _Laid, b: _Laid, dtype: torch.dtype, threads: int) -> int:
    """Bytes at most at a time, of a product of zeros that is computed here.

    Args:
        a: sizes and strides; likewise ``b``.
    """
    with _disable_current_modes(), torch.no_grad(), alone(threads):
        left, right = (_zeros(laid, dtype) for laid in (a, b))
        out = torch.empty((*a[0][:-1], b[0][-1]), dtype=dtype)
        multiply = torch.bmm if out.dim() == 3 else torch.mm
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            multiply(left, right, out=out)
    assert seen.profiler is not None and seen.profiler.kineto_results is not None
    events = (event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]")
    return max(accumulate((event.nbytes() for event in events), initial=0))


def _zeros(laid: _Laid, dtype: torch.dtype) -> Tensor:
    shape, strides = laid
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return torch.zeros(span, dtype=dtype).as_strided(shape, strides)
