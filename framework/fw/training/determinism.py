"""Runs that are the same to the bit, or say what stands against it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fw.errors import RunError

_TORCH_SAYS = re.compile(r"(?:Deterministic behavior was enabled.*?|)(\S+) does not have a deterministic implementation", re.DOTALL)
_CUBLAS_SAYS = "CUBLAS_WORKSPACE_CONFIG"
_WORKSPACES = ":4096:8"
"""With which cuBLAS adds up in one order whatever streams it has: two of eight workspaces of 4 MiB
(https://docs.nvidia.com/cuda/cublas/index.html#results-reproducibility)."""


@contextmanager
def deterministic(asked: bool, device: torch.device) -> Iterator[None]:
    """Within it, torch computes with what gives the same bits each time; afterwards as before.

    Raises:
        RunError: an operator has no such kernel, by its name.
    """
    if not asked:
        yield
        return
    if device.type == "cuda":  # read when a process first multiplies on the GPU
        os.environ.setdefault(_CUBLAS_SAYS, _WORKSPACES)
    before = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    filling: Any = torch.utils.deterministic
    filled, tuned = filling.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    # What is not yet written is read by nobody here, and filling it would take time and, of what a plan knows, nothing.
    filling.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        filling.fill_uninitialized_memory = filled
        torch.backends.cudnn.benchmark = tuned


def prevented(error: BaseException, device: torch.device) -> RunError | None:
    """The sentence of what torch refuses to compute since its bits would differ from run to run; None where it is something else."""
    if not isinstance(error, RuntimeError) or not torch.are_deterministic_algorithms_enabled():
        return None
    text = str(error)
    if found := _TORCH_SAYS.search(text):
        return RunError(
            f"train.deterministic: {found[1]} has no implementation on {device.type} that gives the same bits each time; use another"
            " plugin where it comes from, or train.deterministic=false"
        )
    if _CUBLAS_SAYS in text:
        return RunError(
            f"train.deterministic: {_CUBLAS_SAYS}={os.environ.get(_CUBLAS_SAYS)} lets cuBLAS add up in any order; unset it, or set it to"
            f" {_WORKSPACES}, before Python starts"
        )
    return None
