"""Ranks that are threads of one process, as saving sees them: the same contract, without a network."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Queue
from typing import Any

from torch import Tensor

from fw.kinds.checkpoint import Beat, Ranks


class ThreadRanks(Ranks):
    """One of ``size`` ranks. A send returns when the tensor has been taken, as gloo's does."""

    def __init__(self, rank: int, size: int, shared: Shared) -> None:
        self.rank, self.size, self._shared = rank, size, shared

    def gather(self, value: Any) -> list[Any]:
        """Through a list and two barriers."""
        self._shared.values[self.rank] = value
        self._shared.barrier.wait(30)
        values = list(self._shared.values)
        self._shared.barrier.wait(30)
        return values

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Waits for the receiver."""
        assert tensor.is_contiguous() and tensor.device.type == "cpu"
        taken = threading.Event()
        self._shared.box(self.rank, to, tag).put((tensor, taken))
        assert taken.wait(30), f"rank {to} does not take {tag} from rank {self.rank}"
        self._shared.sent_bytes += tensor.nbytes

    def receive(self, tensor: Tensor, source: int, tag: int) -> None:
        """Waits for the sender."""
        sent, taken = self._shared.box(source, self.rank, tag).get(timeout=30)
        tensor.copy_(sent)
        taken.set()

    def together(self, what: str, work: Callable[[Beat], Any]) -> list[Any]:
        """No time-outs, no rounds."""
        return self.gather(work(Quiet()))


class Shared:
    """What the ranks have in common."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)
        self.sent_bytes = 0
        self._boxes: dict[tuple[int, int, int], Queue[Any]] = {}
        self._lock = threading.Lock()

    def box(self, *key: int) -> Queue[Any]:
        """Where one tensor lies until it is taken."""
        with self._lock:
            return self._boxes.setdefault(key, Queue())  # type: ignore[arg-type]


class Quiet(Beat):
    """Hears nothing of peers."""

    failed = False

    def __call__(self, doing: str = "", size: int = 0) -> None:
        """Nobody listens."""


def on_ranks(size: int, work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """What ``work`` returns, or raises, on each rank."""
    shared = Shared(size)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRanks(rank, size, shared))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    return results
