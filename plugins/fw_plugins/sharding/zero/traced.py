"""DeepSpeed in a process without bytes and without other ranks, where a plan runs its step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fw_plugins.sharding.zero import engine


@contextmanager
def alone(device_type: str) -> Iterator[None]:
    """Within it other ranks say what this one does, nothing has to be compiled, and no file is written. Left, DeepSpeed knows of no process
    group."""
    engine.deepspeed(device_type)
    from deepspeed.ops.adam import cpu_adam
    from deepspeed.runtime.swap_tensor import partitioned_optimizer_swapper, partitioned_param_swapper, pipelined_optimizer_swapper
    from deepspeed.runtime.zero import utils

    with ExitStack() as changed:
        # It compares modules and parameters with those of rank 0: lists of numbers that were broadcast.
        changed.enter_context(patch.object(utils, "get_lst_from_rank0", _sent))
        changed.enter_context(patch.object(utils, "assert_lst_len_same_as_other_ranks", len))
        changed.enter_context(patch.object(cpu_adam, "CPUAdamBuilder", _Adam))
        files = _Files()
        for swapper in (partitioned_optimizer_swapper, partitioned_param_swapper, pipelined_optimizer_swapper):
            changed.enter_context(patch.object(swapper, "AsyncIOBuilder", lambda: files))
        try:
            yield
        finally:
            engine.forget()


def _sent(numbers: list[int]) -> list[int]:
    """What is received of rank 0, in the memory it comes in."""
    torch.tensor(numbers)
    return numbers


class _Adam:
    """In place of what is compiled for the host: it updates where weights and moments lie, and takes nothing."""

    def load(self) -> _Adam:
        """There is nothing to compile."""
        return self

    def create_adam(self, *arguments: Any) -> None:
        """It keeps a few numbers."""

    def adam_update(self, *arguments: Any) -> None:
        """In place."""

    def destroy_adam(self, opt_id: int) -> None:
        """They are gone."""


class _Files:
    """In place of what is compiled for files. Its buffers are its own, and take nothing of torch's allocator."""

    def __init__(self) -> None:
        self._locked: dict[int, Tensor] = {}
        """By the address of the storage object, which is no other's as long as the tensor is here."""

    def load(self, verbose: bool = True) -> _Files:
        """There is nothing to compile."""
        return self

    def aio_handle(self, **settings: Any) -> _Handle:
        """What reads and writes."""
        return _Handle(self._locked)


class _Handle:
    def __init__(self, locked: dict[int, Tensor]) -> None:
        self._locked, self._under_way = locked, 0

    def new_cpu_locked_tensor(self, numel: int, example: Tensor) -> Tensor:
        """A buffer of that many elements like the example."""
        buffer = torch.empty(numel, dtype=example.dtype)
        buffer.untyped_storage().resize_(0)
        self._locked[buffer.untyped_storage()._cdata] = buffer
        return buffer

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether it lies in a buffer."""
        return tensor.untyped_storage()._cdata in self._locked

    def free_cpu_locked_tensor(self, buffer: Tensor) -> bool:
        """It is gone."""
        return self._locked.pop(buffer.untyped_storage()._cdata, None) is not None

    def async_pread(self, buffer: Tensor, path: str, offset: int) -> int:
        """0: it has begun."""
        self._under_way += 1
        return 0

    async_pwrite = async_pread

    def wait(self) -> int:
        """How many are done."""
        done, self._under_way = self._under_way, 0
        return done
