"""What NCCL takes for a collective: nothing that an allocator sees, since it works on the tensors it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from fw.planning.gloo import REDUCE, WAIT, fulfilled

_ALONE, _FOR_TWO, _FOR_MORE = 579 << 20, 544 * 10**6, 688 * 10**6
"""Bytes of a communicator's buffers: alone, with NCCL's kernels (an H200, docs/gpu.md), between 2 ranks, and between more: 4 A100
with NVLink (NVIDIA/nccl#964). They grow with NCCL's channels: fewer over PCIe, and more for exchanges between all pairs of ranks
(NVIDIA/nccl#1685)."""


class Nccl:
    """Stands in for the backend in a process whose collectives do nothing.

    Args:
        key_of: the address of what a tensor lies in.
        called: is told of each collective: the operator, its arguments and its result.
    """

    def __init__(self, key_of: Callable[[Tensor], int], called: Callable[[Any, Any, Any], None]) -> None:
        self._key_of, self._called = key_of, called
        self._under_way: dict[int, list[Tensor]] = {}
        """By the address of what a collective fills, what it was given: that stays until someone waits for the result."""

    def instead(self, func: Any, args: Any) -> Any:
        """The result of what must not run as it is, else None. DDP's reducer wants its tensors from the future."""
        if func is not REDUCE:
            return None
        self._called(func, args, args[0])
        return fulfilled(args[0])

    def exchange(self, func: Any, args: Any, out: Any, category: str, own: Callable[[Any], Iterator[Tensor]]) -> Any:
        """A collective has been called; returns its result."""
        if func is WAIT:
            self._under_way.pop(self._key_of(args[0]), None)
            return out
        self._called(func, args, out)
        if func.namespace == "_c10d_functional" and isinstance(out, Tensor):
            self._under_way[self._key_of(out)] = list(own(args))
        return out

    def settle(self) -> None:
        """Nothing lingers."""


def communicators_bytes(groups: Iterable[Sequence[int]]) -> int:
    """Of the driver's memory, for communicators between these ranks."""
    sizes = [len(group) for group in groups]
    return sum(_FOR_TWO if size == 2 else _FOR_MORE for size in sizes if size > 1) or (_ALONE if sizes else 0)
