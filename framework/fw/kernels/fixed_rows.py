"""Products of one number of rows, whatever there is to compute: a library divides a product by its shape, and adds up otherwise for others.

With that number torch does all else on the CPU in one thread: where it divides what lies one behind another, the last numbers of a part are
computed by other instructions, to other last bits, and a row would depend on where it stands.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fw.kernels.threads import alone

_PRODUCTS = frozenset(
    {F.linear, torch.mm, torch.bmm, torch.matmul, torch.addmm, torch.baddbmm, Tensor.mm, Tensor.bmm, Tensor.matmul, Tensor.__matmul__}
)


class _Now(threading.local):
    rows: int | None = None
    threads: int | None = None


_now = _Now()


def rows_of_products() -> int | None:
    """That every product of matrices is to have now; None for any number."""
    return _now.rows


class _Products(TorchFunctionMode):
    """Gives products all threads."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _several() if func in _PRODUCTS else nullcontext():
            return func(*args, **(kwargs or {}))


def _several() -> AbstractContextManager[None]:
    return nullcontext() if _now.threads is None else alone(_now.threads)


@contextmanager
def fixed_rows(rows: int, device: torch.device) -> Iterator[None]:
    """Whoever computes with as many rows as there are has to make ``rows`` of them meanwhile."""
    before = _now.rows, _now.threads
    on_cpu = device.type == "cpu"
    _now.rows, _now.threads = rows, torch.get_num_threads() if on_cpu else None
    try:
        with alone() if on_cpu else nullcontext(), _Products() if on_cpu else nullcontext():
            yield
    finally:
        _now.rows, _now.threads = before


def grouped_product(x_TK: Tensor, weight_EKN: Tensor, ends: list[int], rows: int) -> Tensor:
    """``[T, N]``: rows up to each end times the matrix of their group, ``rows`` at a time."""
    out_TN = x_TK.new_empty(x_TK.shape[0], weight_EKN.shape[2])
    x_RK, start = x_TK.new_zeros(rows, x_TK.shape[1]), 0
    for group, end in enumerate(ends):
        for first in range(start, end, rows):
            count = min(rows, end - first)
            x_RK[:count] = x_TK[first : first + count]
            with _several():
                out_TN[first : first + count] = torch.mm(x_RK, weight_EKN[group])[:count]
        start = end
    return out_TN
