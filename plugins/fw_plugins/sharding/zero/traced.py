"""DeepSpeed in a process without bytes and without other ranks, where a plan runs its step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from fw_plugins.sharding.zero import engine


@contextmanager
def alone(device_type: str) -> Iterator[None]:
    """Within it other ranks say what this one does, and at its end DeepSpeed knows of no process group."""
    engine.deepspeed(device_type)
    from deepspeed.comm import comm
    from deepspeed.runtime.zero import utils
    from deepspeed.utils import groups

    try:
        # It compares modules and parameters with those of rank 0: lists of numbers that were broadcast.
        with patch.object(utils, "get_lst_from_rank0", _sent), patch.object(utils, "assert_lst_len_same_as_other_ranks", _sent):
            yield
    finally:
        groups._release_process_group_references()
        comm.cdb = None


def _sent(numbers: list[int]) -> list[int]:
    """What is received of rank 0, in the memory it comes in."""
    torch.tensor(numbers)
    return numbers
