"""What offload moves, and how fast, beside the most that the same way can carry."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fw.meter.intervals import Interval, length, union

TO_DISK, FROM_DISK = "to the disk", "from the disk"
TO_HOST, TO_GPU = "to the host", "to the GPU"
WAYS = (TO_DISK, FROM_DISK, TO_HOST, TO_GPU)

_BYTES = 128 << 20
_GPU_BYTES = 32 << 20
_TIMES = 3


@dataclass(frozen=True)
class Transfer:
    """All that went one way in a step.

    Attributes:
        way: of :data:`WAYS`.
        nbytes: in all.
        seconds: in which any of it was under way.
        most: bytes per second that were measured there by themselves, one large piece at a time; 0 where nobody did. A disk's is of the
            disk itself: what the system still has in its cache comes faster.
    """

    way: str
    nbytes: int
    seconds: float
    most: float = 0.0

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.seconds if self.seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        """Its attributes."""
        return asdict(self)


class _Notes:
    """Of all threads of the process; for one who listens at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heard: dict[str, list[tuple[Interval, int]]] | None = None
        self.directory: Path | None = None

    def begin(self) -> None:
        with self._lock:
            self._heard, self.directory = defaultdict(list), None

    def add(self, way: str, begin: int, end: int, nbytes: int, directory: Path) -> None:
        with self._lock:
            if self._heard is not None:
                self._heard[way].append(((begin, end), nbytes))
                self.directory = directory

    def end(self) -> Mapping[str, list[tuple[Interval, int]]]:
        with self._lock:
            heard, self._heard = self._heard or {}, None
            return heard


_notes = _Notes()


@contextmanager
def disk_transfer(way: str, nbytes: int, directory: Path) -> Iterator[None]:
    """Around what moves ``nbytes`` to or from a file below ``directory``, on any thread; heard where a step is traced."""
    begin = time.perf_counter_ns()
    yield
    _notes.add(way, begin, time.perf_counter_ns(), nbytes, directory)


@contextmanager
def heard() -> Iterator[list[Transfer]]:
    """What plugins have told of with :func:`disk_transfer` in it, and what the disk can do; the list is filled at the end."""
    found: list[Transfer] = []
    _notes.begin()
    try:
        yield found
    finally:
        told = _notes.end()
    if told and _notes.directory is not None:
        most = disk_rates(_notes.directory)
        found += [transfer(way, told[way], most[way]) for way in WAYS if way in told]


def transfer(way: str, moved: Iterable[tuple[Interval, int]], most: float = 0.0) -> Transfer:
    """Of pieces, each with the nanoseconds from when to when it was under way."""
    moved = list(moved)
    return Transfer(way, sum(nbytes for _, nbytes in moved), length(union(interval for interval, _ in moved)) / 1e9, most)


def disk_rates(directory: Path) -> dict[str, float]:
    """Bytes per second to and from the disk below ``directory``: written until they are there, and read when the system has forgotten them.

    0 where there is no room to try.
    """
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, _BYTES)
            data = memoryview(bytearray(_BYTES))
            with mmap.mmap(file.fileno(), _BYTES) as memory:

                def write() -> None:
                    memory[:] = data
                    memory.flush()

                to = _rate(write)

            def read() -> None:
                done = 0
                while done < _BYTES and (count := os.preadv(file.fileno(), [data[done:]], done)):
                    done += count

            return {TO_DISK: to, FROM_DISK: _rate(read, before=lambda: _forget(file.fileno()))}
    except OSError:
        return {TO_DISK: 0.0, FROM_DISK: 0.0}


def gpu_rates(device: torch.device) -> dict[str, float]:
    """Bytes per second between page-locked host memory and a GPU; nothing where no memory is left to try."""
    try:
        there = torch.empty(_GPU_BYTES, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return {}
    here = torch.empty(_GPU_BYTES, dtype=torch.uint8, pin_memory=True)

    def copying(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        def copy() -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)

        return copy

    found = {way: _rate(move, nbytes=_GPU_BYTES) for way, move in ((TO_HOST, copying(here, there)), (TO_GPU, copying(there, here)))}
    del here, there
    torch.cuda.empty_cache()
    return found


def _rate(move: Callable[[], None], before: Callable[[], None] = lambda: None, nbytes: int = _BYTES) -> float:
    taken = []
    for _ in range(_TIMES):
        before()
        begin = time.perf_counter()
        move()
        taken.append(time.perf_counter() - begin)
    return nbytes / median(taken)


def _forget(descriptor: int) -> None:
    """Nothing is mapped, and all of it is on the disk: else it would stay."""
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
