"""The process group that this process is in: joined, and left so that the next one finds nothing of it."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

_hook_before: Any = None
"""What told of uncaught errors before the process group was joined here; None where it was not."""


def join(backend: str, **how: Any) -> None:
    """Join a process group, as ``torch.distributed.init_process_group`` says.

    Raises:
        DistError: the others have not come within the time.
    """
    global _hook_before
    before = sys.excepthook
    dist.init_process_group(backend, **how)
    _hook_before = before


def leave() -> None:
    """Leave the process group, if it was joined here; ranks that end without it sometimes die in their last moments."""
    global _hook_before
    if _hook_before is None or not dist.is_initialized():
        return
    dist.destroy_process_group()
    sys.excepthook, _hook_before = _hook_before, None  # joining puts one before it that names the rank
    # What DTensor remembers of shardings knows groups by their names, which are given anew from the next one on.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    if (clear := getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)) is not None:  # torch 2.10 and later
        clear()
