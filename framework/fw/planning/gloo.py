"""What gloo takes for a collective besides what ranks exchange, and how long it keeps that (ProcessGroupGloo.cpp of torch 2.13).

A thread of its own does the work, and drops what it used when it comes to it: memory that may be gone at once or stay for a while is
optional, so that a prediction has a lower and an upper end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fw.meter.account import Block

_GATHERS = ("c10d::_allgather_base_", "_c10d_functional::all_gather_into_tensor")
_SCATTERS = ("c10d::_reduce_scatter_base_", "_c10d_functional::reduce_scatter_tensor")
_GATHER = torch.ops.c10d._allgather_base_.default
REDUCE = torch.ops.c10d.allreduce_.default
WAIT = torch.ops._c10d_functional.wait_tensor.default
_work_of = torch._C._distributed_c10d._create_work_from_future  # type: ignore[attr-defined]


class Gloo:
    """Stands in for the backend in a process whose collectives do nothing.

    Args:
        came, went: are told of its own memory, by a number that is no address.
        key_of: the address of what a tensor lies in.
        lives: whether memory at an address is still there.
    """

    def __init__(
        self,
        came: Callable[[int, Block], None],
        went: Callable[[int], None],
        key_of: Callable[[Tensor], int],
        lives: Callable[[int], bool],
    ) -> None:
        self._came, self._went, self._key_of, self._lives = came, went, key_of, lives
        self._numbers = itertools.count(-1, -1)
        self._under_way: dict[int, tuple[list[Tensor], int | None]] = {}
        """By the address of what a collective fills: what it was given, and the number of its own memory."""
        self._works: dict[int, _Work] = {}
        self._lingering: list[int] = []

    def instead(self, func: Any, args: Any) -> Any:
        """The result of what must not run as it is, else None. DDP's reducer wants its tensors from the future."""
        if func is not REDUCE:
            return None
        return fulfilled(args[0])

    def exchange(self, func: Any, args: Any, out: Any, category: str, own: Callable[[Any], Iterator[Tensor]]) -> Any:
        """A collective has been called; returns its result.

        Args:
            category: of its memory.
            own: those of some values that are tensors of the program.
        """
        if func is WAIT:
            self.waited(self._key_of(args[0]), category)
            return out
        nbytes = _own_bytes(func, args, out)
        if nbytes:
            moment = self._take(Block(nbytes, category))
            self._went(moment)
        if func is _GATHER:
            key = self._key_of(out[0])
            self._works[key] = _Work(lambda: self.waited(key, category))
            self._under_way[key] = [], self._take(Block(nbytes, category, optional=True))
            return out[0], self._works[key].boxed()
        if func.namespace == "_c10d_functional" and isinstance(out, Tensor):  # it keeps its input until it is waited for
            taken = self._take(Block(nbytes, category, optional=True)) if nbytes else None
            self._under_way[self._key_of(out)] = list(own(args)), taken
        return out

    def waited(self, key: int, category: str) -> None:
        """The collective that fills the memory at ``key`` is done; what lingered is gone by now."""
        self.settle()
        gathers = self._works.pop(key, None) is not None
        kept, taken = self._under_way.pop(key, ([], None))
        if taken is not None and gathers:  # a flat tensor is gone with the work, a clone with its record
            self._went(taken)
        elif taken is not None:
            self._lingering.append(taken)
        sizes = {self._key_of(tensor): tensor.untyped_storage().nbytes() for tensor in kept}
        del kept
        gone = [nbytes for address, nbytes in sizes.items() if not self._lives(address)]
        self._lingering += [self._take(Block(nbytes, category, optional=True)) for nbytes in gone]

    def settle(self) -> None:
        """All that is done is gone."""
        while self._lingering:
            self._went(self._lingering.pop())

    def _take(self, block: Block) -> int:
        number = next(self._numbers)
        self._came(number, block)
        return number


def fulfilled(given: Any) -> tuple[list[Tensor], Any]:
    """What an all-reduce of these returns, and its work, which is done."""
    tensors = list(given)
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result(tensors)
    return tensors, _work_of(future).boxed()


class _Work(dist.Work):
    """A gather under way."""

    def __init__(self, done: Callable[[], None]) -> None:
        super().__init__()
        self._done = done

    def wait(self, timeout: Any = None) -> bool:
        """It is done."""
        self._done()
        return True


def _own_bytes(func: Any, args: Any, out: Any) -> int:
    """Of its buffers: gathers go to a flat tensor first, and what is summed and scattered is cloned. Others need none."""
    name = func._schema.name
    if name in _GATHERS:
        return _nbytes(args[0] if name == _GATHERS[0] else out)
    if name in _SCATTERS:
        return _nbytes(args[1] if name == _SCATTERS[0] else args[0])
    return 0


def _nbytes(tensor: Any) -> int:
    return tensor.numel() * tensor.element_size() if isinstance(tensor, Tensor) else 0
