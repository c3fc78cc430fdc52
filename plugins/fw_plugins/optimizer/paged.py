"""Optimizer state in CUDA's managed memory, which the driver moves to the host when the device is full, and back when it is used."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import sys
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fw.api import OffloadPolicy, RunError, UserError, on_gpu, planned_gpu
from fw_plugins.optimizer.per_parameter import PerParameter, local

_LEAST_BYTES = 1 << 16
"""State below this stays in ordinary memory: a managed allocation takes whole pages."""

_TYPES = {1: "|u1", 2: "<i2", 4: "<f4", 8: "<f8"}
"""A number type of each size, for what describes bare memory; tensors get their own by a view."""


def check(name: str, plain: str, device_type: str, offload: OffloadPolicy) -> None:
    """Refuse where there is nothing to page, or nothing to page with.

    Args:
        name: of the optimizer; ``plain``: of the same without pages.

    Raises:
        UserError: with what would work.
    """
    if offload.optimizer != "device":
        raise UserError(
            f"offload.optimizer: {offload.optimizer} takes all state there, and {name} only what the device has no room for; use"
            f" optimizer={plain}, or offload.optimizer=device"
        )
    if device_type != "cuda":
        return
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            f"optimizer.name: {name} takes its memory from bitsandbytes: pip install fw[bitsandbytes], or use optimizer={plain}"
        )
    if sys.platform != "linux" or "microsoft" in platform.release().lower():
        raise UserError(f"optimizer.name: {name} needs Linux itself, where GPU and host may use one page in turn; use optimizer={plain}")


def note(name: str, plain: str, device: torch.device) -> str:
    """What to know before a run."""
    return "" if pages_on(device) else f"optimizer {name} saves nothing on the CPU, which has no pages to move; computed as {plain}"


def pages_on(device: torch.device) -> bool:
    """Whether managed memory exists for a device."""
    return device.type == "cuda"


def _placed(paged: Tensor, value: Tensor) -> Tensor:
    """Divided as ``value`` is."""
    if not isinstance(value, DTensor):
        return paged
    return DTensor.from_local(paged, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride())


class _Memory:
    """Bare memory as ``__cuda_array_interface__`` (version 3) describes it."""

    def __init__(self, page: Tensor) -> None:
        self._page = page
        self.__cuda_array_interface__ = {
            "shape": tuple(page.shape),
            "typestr": _TYPES[page.element_size()],
            "data": (page.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


def on_device(page: Tensor, device: torch.device) -> Tensor:
    """The same memory as a tensor of the device, whose kernels may use it.

    What bitsandbytes gives is a tensor of the host over managed memory, for kernels of its own that take bare addresses.
    """
    seen = torch.as_tensor(_Memory(page), device=device)
    if seen.data_ptr() != page.data_ptr():
        raise RunError(f"torch made a copy of managed memory on {device} instead of using it; use an optimizer that is not paged")
    return seen.view(page.dtype)


class Paged(PerParameter):
    """State of size in managed memory; mixed into an update before the class that has the mathematics.

    bitsandbytes never frees such memory: a tensor of it is made once for each piece of state, and what a checkpoint gives is copied into
    that. Before a parameter is updated its pages are asked for, all at once; else each would be fetched when a kernel misses it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pages: dict[Tensor, dict[str, tuple[Tensor, Tensor]]] = {}
        """Per parameter and key: the page as bitsandbytes knows it, and as the device does."""
        if any(pages_on(p.device) for group in self.param_groups for p in group["params"]):
            lib: Any = importlib.import_module("bitsandbytes.cextension").lib
            if not getattr(lib, "compiled_with_cuda", False):
                raise UserError(
                    f"optimizer.name: the bitsandbytes that is installed has no library for CUDA {torch.version.cuda}; install one that"
                    " has, or use an optimizer that is not paged"
                )

    def first_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Of one parameter at a time it is in ordinary memory for a moment."""
        first = super().first_state(parameter, group)  # type: ignore[safe-super]
        return {key: self.place(parameter, key, value) for key, value in first.items()}

    def place(self, parameter: Tensor, key: str, value: Tensor) -> Tensor:
        """The state to keep, with these values: those of a checkpoint, or the first ones."""
        kept = local(value)
        planned = planned_gpu() is not None and on_gpu(parameter)
        if not (planned or pages_on(parameter.device)) or kept.nbytes < _LEAST_BYTES:
            return value
        if planned:  # where the device has no room for managed memory, it is the host's
            paged = torch.empty_like(kept, pin_memory=True).copy_(kept)
            return _placed(paged, value)
        pages = self._pages.setdefault(parameter, {})
        if key not in pages or pages[key][1].shape != kept.shape or pages[key][1].dtype != kept.dtype:
            functional: Any = importlib.import_module("bitsandbytes.functional")
            with torch.cuda.device_of(kept):  # memory is made for the current device
                page = functional.get_paged(*kept.shape, dtype=kept.dtype, device=kept.device)
            pages[key] = page, on_device(page, kept.device)
        return _placed(pages[key][1].copy_(kept), value)

    def update(self, parameter: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """As without pages."""
        if parameter in self._pages:
            functional: Any = importlib.import_module("bitsandbytes.functional")
            for page, _ in self._pages[parameter].values():
                functional.prefetch_tensor(page)
        super().update(parameter, grad, state, group)  # type: ignore[safe-super]
