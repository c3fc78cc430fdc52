"""What computes, here or in a plan for another device: asked by whatever does otherwise on a GPU.

A plan runs on fake tensors of the CPU, whatever it is for (:mod:`fw.planning.trace`). Tensors then do not tell where they would be, nor
torch what the GPU has; both are asked here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class PlannedGPU:
    """The GPU that a plan is for.

    Attributes:
        capability: major and minor.
        is_on_host: whether a tensor would be in host memory.
    """

    name: str
    capability: tuple[int, int]
    is_on_host: Callable[[Tensor], bool]


_planned: list[PlannedGPU] = []


@contextmanager
def planning_for(gpu: PlannedGPU) -> Iterator[None]:
    """Within it, answers are those of ``gpu``."""
    _planned.append(gpu)
    try:
        yield
    finally:
        _planned.pop()


def planned_gpu() -> PlannedGPU | None:
    """What is planned for; None outside of a plan, and in one for the CPU."""
    return _planned[-1] if _planned else None


def on_gpu(tensor: Tensor) -> bool:
    """Whether a tensor is, or would be, in a GPU's memory."""
    gpu = planned_gpu()
    return tensor.is_cuda if gpu is None else tensor.device.type != "meta" and not gpu.is_on_host(tensor)


class Update(Protocol):
    """What an optimizer does with one parameter, whatever it does with others."""

    def __call__(self, parameter: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any], /) -> None: ...


_in_place_of: list[Callable[[Update, Tensor, Tensor, dict[str, Tensor], dict[str, Any]], bool]] = []


@contextmanager
def updates_by(stand_in: Callable[[Update, Tensor, Tensor, dict[str, Tensor], dict[str, Any]], bool]) -> Iterator[None]:
    """Within it, ``stand_in`` is asked to do what an update does with memory; False where it leaves that to the update."""
    _in_place_of.append(stand_in)
    try:
        yield
    finally:
        _in_place_of.pop()


def update_alone(update: Update, parameter: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    """Update a parameter by a function of nothing else, which gives back all memory it takes.

    A plan calls it once for parameters that are alike in shape, dtype and placement, of a group with the same options; all else does
    each time.
    """
    if not (_in_place_of and _in_place_of[-1](update, parameter, grad, state, group)):
        update(parameter, grad, state, group)


def gpu_capability(device: torch.device) -> tuple[int, int] | None:
    """Of a GPU, major and minor; None of the CPU, and of a GPU of another host."""
    if (gpu := planned_gpu()) is not None:
        return gpu.capability if device.type == "cuda" else None
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)
