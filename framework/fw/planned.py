"""What computes, here or in a plan for another device: asked by whatever does otherwise on a GPU.

A plan runs on fake tensors of the CPU, whatever it is for (:mod:`fw.planning.trace`). Tensors then do not tell where they would be, nor
torch what the GPU has; both are asked here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
        emptied: is told that the allocator gives back what it keeps and nobody uses.
        recording: is entered while a CUDA graph is recorded, whose memory is its own.
        on_host: what is made within it is in host memory.
    """

    name: str
    capability: tuple[int, int]
    is_on_host: Callable[[Tensor], bool]
    emptied: Callable[[], None] = lambda: None
    recording: Callable[[], AbstractContextManager[None]] = nullcontext
    on_host: Callable[[], AbstractContextManager[None]] = nullcontext


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
    return tensor.is_cuda or (gpu is not None and tensor.device.type != "meta" and not gpu.is_on_host(tensor))


def is_gpu(device: torch.device) -> bool:
    """Whether it is a GPU, or stands for one."""
    return device.type == "cuda" or planned_gpu() is not None


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Of the GPU that ``device`` is, or stands for; None of the CPU."""
    return gpu_capability(device) if (gpu := planned_gpu()) is None else gpu.capability


def made_current(device: torch.device) -> AbstractContextManager[object]:
    """Meanwhile it is the GPU that kernels, streams and events of this thread are of, whoever starts them; nothing else changes."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def empty_cache() -> None:
    """Give back what the GPU's allocator keeps and nobody uses, as ``torch.cuda.empty_cache`` does."""
    if (gpu := planned_gpu()) is not None:
        gpu.emptied()
    else:
        torch.cuda.empty_cache()


class Update(Protocol):
    """What an optimizer does with one parameter, whatever it does with others."""

    def __call__(self, parameter: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any], /) -> None: ...


StandIn = Callable[[Update, Tensor, Tensor, dict[str, Tensor], dict[str, Any]], bool]
"""Does what an update does with memory; False where it leaves that to the update."""

_in_place_of: list[StandIn] = []


@contextmanager
def updates_by(stand_in: StandIn) -> Iterator[None]:
    """Within it, ``stand_in`` is asked before each update of :func:`update_alone`."""
    _in_place_of.append(stand_in)
    try:
        yield
    finally:
        _in_place_of.pop()


def update_alone(update: Update, parameter: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    """Update a parameter by a function, or a method of an optimizer, whose need for memory depends on what it is given alone.

    In a plan the update of one parameter stands for those of others that are alike: in shape, strides, dtype, device and placement of
    parameter, gradient and state, in what numbers the state has, and in the options of the group. For these the function is not called.
    What else an update goes by, attributes of the optimizer or of the parameter, is not compared; one that keeps memory, gives some back
    that it did not take, or has state of another kind than tensors and numbers is called for each. Everywhere else it is called each time.
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
