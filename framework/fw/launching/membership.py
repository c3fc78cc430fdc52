"""The process group that this process is in: joined, and left so that the next one finds nothing of it."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

_hooks: tuple[Any, Any] | None = None
"""What told of uncaught errors before the process group was joined here, and since; None where it was not."""


def join(backend: str, **how: Any) -> None:
    """Join a process group, as ``torch.distributed.init_process_group`` says.

    Raises:
        DistError: the others have not come within the time.
    """
    global _hooks
    before = sys.excepthook
    try:
        dist.init_process_group(backend, **how)
    finally:
        if dist.is_initialized():  # also where what comes after that fails
            _hooks = before, sys.excepthook


def leave() -> None:
    """Leave the process group, if it was joined here; ranks that end without it sometimes die in their last moments."""
    global _hooks
    if _hooks is None or not dist.is_initialized():
        return
    (before, since), _hooks = _hooks, None
    try:
        dist.destroy_process_group()
    finally:
        if sys.excepthook is since:  # joining puts one before it that names the rank
            sys.excepthook = before
        _forget_shardings()


def _forget_shardings() -> None:
    """What DTensor remembers of them knows groups by their names, which are given anew from the next one on."""
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    if (clear := getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)) is not None:  # torch 2.10 and later
        clear()
