"""DeepSpeed in a process without bytes and without other ranks, where a plan runs its step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from fw_plugins.sharding.zero import engine


@contextmanager
def alone(device_type: str) -> Iterator[None]:
    """Within it other ranks say what this one does, and at its end DeepSpeed knows of no process group."""
    engine.deepspeed(device_type)
    from deepspeed.comm import comm
    from deepspeed.ops.adam import cpu_adam
    from deepspeed.runtime.zero import utils
    from deepspeed.utils import groups

    with ExitStack() as changed:
        # It compares modules and parameters with those of rank 0: lists of numbers that were broadcast.
        changed.enter_context(patch.object(utils, "get_lst_from_rank0", _sent))
        changed.enter_context(patch.object(utils, "assert_lst_len_same_as_other_ranks", len))
        changed.enter_context(patch.object(cpu_adam, "CPUAdamBuilder", _Adam))
        try:
            yield
        finally:
            groups._release_process_group_references()
            comm.cdb = None


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
