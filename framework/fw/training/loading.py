"""Batches in a given order, read here or by processes ahead of time."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import signal
import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from fw.config import LoaderSection
from fw.kinds.data import IGNORED, Sample, Samples


class _Padded(Dataset[Sample]):
    """Index -1 is a sample in which nothing is predicted."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __getitem__(self, index: int) -> Sample:
        if index >= 0:
            return self._samples[index]
        like = self._samples[0]
        return {**{k: torch.zeros_like(v) for k, v in like.items()}, "labels": torch.full_like(like["labels"], IGNORED)}


def _stack(samples: list[Sample]) -> dict[str, Tensor]:
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def loader(samples: Samples, order: Sampler[list[int]], settings: LoaderSection, device: torch.device) -> DataLoader[Any]:
    """Batches ``[share, L]`` of each key, in the given order whatever the settings."""
    ahead: dict[str, Any] = {}
    if settings.workers:
        atexit.register(_end_workers)
        ahead = {
            "num_workers": settings.workers,
            "prefetch_factor": settings.prefetch,
            "persistent_workers": settings.persistent,
            "worker_init_fn": _begin_worker,
        }
    return DataLoader(
        _Padded(samples),
        batch_sampler=order,
        collate_fn=_stack,
        pin_memory=device.type == "cuda" if settings.pin_memory is None else settings.pin_memory,
        # A loader draws a seed for workers each time it begins, also where it has none; dropout must not notice.
        generator=torch.Generator(),
        **ahead,
    )


def _begin_worker(number: int) -> None:
    """A stop is the training process's affair: a worker that ends of it takes the run along before it has saved."""
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(stop, signal.SIG_IGN)
    torch.set_num_threads(1)
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _end_workers() -> None:
    """What is left of them, before multiprocessing would wait for their end in vain."""
    for child in multiprocessing.active_children():
        child.kill()
