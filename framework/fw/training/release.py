"""Memory given back between the phases of a run (training, validation, saving), whose tensors do not fit each other's gaps."""

from __future__ import annotations

import gc
import time

import torch

from fw.meter.memory import held_bytes
from fw.training.host_allocator import give_back_freed_memory


class Release:
    """Called where one phase ends and another begins.

    What malloc keeps free goes back to the kernel in any case. With ``thorough`` objects in reference cycles are collected first and the
    caching allocator of a GPU is emptied, and what that does is measured.
    """

    def __init__(self, device: torch.device, thorough: bool) -> None:
        self.thorough = thorough
        self.times = 0
        self.seconds = 0.0
        self.bytes: int | None = 0
        """By which this process shrank in all: reserved memory of a GPU, else resident memory; None where the system does not tell."""
        self._device = device

    def between_phases(self) -> None:
        """Give back what is free."""
        if not self.thorough:
            give_back_freed_memory()
            return
        begun, before = time.perf_counter(), held_bytes(self._device)
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        give_back_freed_memory()
        after = held_bytes(self._device)
        self.times += 1
        self.seconds += time.perf_counter() - begun
        if self.bytes is not None:
            self.bytes = None if before is None or after is None else self.bytes + max(0, before - after)
