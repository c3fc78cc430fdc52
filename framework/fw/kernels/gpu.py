"""Whether fw's kernels for GPUs are to be had: they are written in Triton, which torch's builds for CUDA bring along."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _new_enough(index: int) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(index) >= (8, 0)


def available(device: torch.device) -> bool:
    """Whether kernels run there: on NVIDIA's GPUs from Ampere on, where Triton is installed."""
    return device.type == "cuda" and _installed() and _new_enough(torch.cuda.current_device() if device.index is None else device.index)


def takes(*tensors: Tensor) -> bool:
    """Whether these are what kernels are for: of 16 bits, on such a GPU, numbers of a row behind one another."""
    return all(x.is_cuda and x.dtype in HALVES and x.stride(-1) == 1 and available(x.device) for x in tensors)


def attention(device: torch.device) -> Any:
    """:mod:`fw.kernels.gpu_attention`; None where it is not to be had. Importing it takes longer than a laptop should wait."""
    return importlib.import_module("fw.kernels.gpu_attention") if available(device) else None


@functools.cache
def elementwise() -> Any:
    """:mod:`fw.kernels.gpu_elementwise`, of what :func:`takes` takes."""
    return importlib.import_module("fw.kernels.gpu_elementwise")
