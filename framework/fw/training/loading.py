"""Batches in a given order, read here or by processes ahead of time."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from fw.config import LoaderSection
from fw.kinds.data import Sample
from fw.training.batches import Plan, Source
from fw.training.packing import pad


class Batch(NamedTuple):
    """What one replica computes in an optimizer step, or in a step of validation.

    Attributes:
        micro_batches: ``[B, L]`` of each key, B and L of each its own.
        lengths: as in :class:`Plan`.
    """

    micro_batches: list[dict[str, Tensor]]
    lengths: NDArray[np.int64]


class _Planned(Dataset[Batch]):
    """A plan is its index."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitem__(self, plan: Plan) -> Batch:
        return Batch([self._micro_batch(indices) for indices in plan.micro_batches], plan.lengths)

    def _micro_batch(self, indices: list[int]) -> dict[str, Tensor]:
        source = self._source
        samples = [source.samples[index] for index in indices]
        if not samples:  # one row of padding, as short as rows may be
            samples = [{key: value[:0] for key, value in source.samples[0].items()}]
        if source.padding is not None:
            samples = [{**sample, "segments": sample.get("segments", torch.ones_like(sample["labels"]))} for sample in samples]
        elif indices:
            return _stack(samples)
        longest = np.array([max(1, *(len(sample["labels"]) for sample in samples))])
        length = int(source.lengths[0] if source.padding is None else source.padding.padded(longest)[0])
        return _stack([pad(sample, length) for sample in samples])


def _stack(samples: list[Sample]) -> dict[str, Tensor]:
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def _as_it_is(batch: Any) -> Any:
    return batch


_workers: WeakSet[Any] = WeakSet()
"""Processes of all loaders."""


class WaitedLoader(DataLoader[Any]):
    """Counts the seconds in which somebody waited for a batch."""

    waited_seconds = 0.0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = super().__iter__()
        _workers.update(getattr(batches, "_workers", ()))
        while True:
            began = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self.waited_seconds += time.perf_counter() - began
            yield batch


def loader(source: Source, plans: Sampler[Plan] | Sequence[Plan], settings: LoaderSection, device: torch.device) -> WaitedLoader:
    """A :class:`Batch` per plan, in their order whatever the settings."""
    ahead: dict[str, Any] = {}
    if settings.workers:
        atexit.register(_end_workers)
        ahead = {
            "num_workers": settings.workers,
            "prefetch_factor": settings.prefetch,
            "persistent_workers": settings.persistent,
            "worker_init_fn": _begin_worker,
        }
    return WaitedLoader(
        _Planned(source),
        sampler=plans,
        batch_size=None,
        collate_fn=_as_it_is,
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
        if child in _workers:
            child.kill()
