"""Whether fw's kernels for GPUs are to be had: they are written in Triton, which torch's builds for CUDA bring along."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from fw.planned import on_gpu, planned_gpu

HALVES = (torch.bfloat16, torch.float16)
_SINCE = (8, 0)
"""Compute capability: Ampere."""


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _new_enough(index: int) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(index) >= _SINCE


def available(device: torch.device) -> bool:
    """Whether kernels run there: on NVIDIA's GPUs from Ampere on, where Triton is installed."""
    if (planned := planned_gpu()) is not None:
        return planned.capability >= _SINCE
    return device.type == "cuda" and _installed() and _new_enough(torch.cuda.current_device() if device.index is None else device.index)


def takes(*tensors: Tensor) -> bool:
    """Whether these are what kernels are for: of 16 bits, on such a GPU, numbers of a row behind one another."""
    return all(on_gpu(x) and x.dtype in HALVES and x.stride(-1) == 1 and available(x.device) for x in tensors)


def attention(device: torch.device) -> Any:
    """:mod:`fw.kernels.gpu_attention`; None where its kernels are not to be had."""
    return importlib.import_module("fw.kernels.gpu_attention") if available(device) else None


@functools.cache
def elementwise() -> Any:
    """:mod:`fw.kernels.gpu_elementwise`, of what :func:`takes` takes."""
    return importlib.import_module("fw.kernels.gpu_elementwise")


class _None:
    """Whatever is started of it does nothing."""

    def __getattr__(self, name: str) -> _None:
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> _None:
        return self

    def __call__(self, *given: Any, **constants: Any) -> None:
        pass


_NONE = _None()


def kernels(of: str, given: Tensor) -> Any:
    """Those in Triton: of ``attention`` or ``elementwise``, each to be started as ``kernel[grid](…)``. Of tensors that stand for a GPU's in
    a plan they compute nothing. Importing them takes longer than a laptop should wait."""
    return _NONE if planned_gpu() is not None and not given.is_cuda else _compiled(of)


@functools.cache
def _compiled(of: str) -> Any:
    return importlib.import_module(f"fw.kernels.triton_{of}")


def power_of_two(n: int) -> int:
    """The smallest that is no smaller."""
    return 1 << (n - 1).bit_length()


def parts(n: int, size: int) -> int:
    """Of that size, that hold so many."""
    return -(-n // size)
