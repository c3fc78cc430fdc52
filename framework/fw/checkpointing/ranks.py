"""Ranks that save together: on the host, on process groups of their own, and with an end on every rank whatever happens to one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from torch import Tensor

from fw.errors import RunError, describe
from fw.kinds.checkpoint import Beat, Ranks

T = TypeVar("T")
_ROUND_SECONDS = 1.0


class _Progress(Beat):
    def __init__(self) -> None:
        self.count = 0
        self.doing = ""
        self._failed = threading.Event()

    def __call__(self, doing: str = "", size: int = 0) -> None:
        self.count += 1
        self.doing = doing or self.doing

    @property
    def failed(self) -> bool:
        return self._failed.is_set()

    def fail(self) -> None:
        self._failed.set()


class OneRank(Ranks):
    """A run without peers."""

    rank, size = 0, 1

    def gather(self, value: Any) -> list[Any]:
        """Its own."""
        return [value]

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Never asked for."""
        raise NotImplementedError

    def receive(self, tensor: Tensor, source: int, tag: int) -> None:
        """Never asked for."""
        raise NotImplementedError

    def together(self, what: str, work: Callable[[Beat], T]) -> list[T]:
        """Right here."""
        try:
            return [work(_Progress())]
        except Exception as error:
            raise RunError(f"{what}: {describe(error)}") from error


class GlooRanks(Ranks):
    """Process groups over gloo, one for tensors and one for what ranks tell each other of themselves.

    Collective to make. Neither is used by training, so saving goes on in a thread while training uses its own groups.

    Args:
        timeout: after which a rank that makes no progress is given up.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._seconds = timeout.total_seconds()
        self._tensors = dist.new_group(backend="gloo", timeout=timeout)
        self._words = dist.new_group(backend="gloo", timeout=timeout)
        self._lost = ""

    def gather(self, value: Any) -> list[Any]:
        """By rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._words)
        return values

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Blocks."""
        dist.send(tensor, to, group=self._tensors, tag=tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> None:
        """Blocks."""
        dist.recv(tensor, source, group=self._tensors, tag=tag)

    def together(self, what: str, work: Callable[[Beat], T]) -> list[T]:
        """The work is done in a thread; meanwhile ranks tell each other once a second how far they are."""
        if self._lost:
            raise RunError(self._lost)
        progress, result = _Progress(), _Result[T]()
        thread = threading.Thread(target=result.of, args=(work, progress), name=what, daemon=True)
        thread.start()
        seen = [(-1, time.monotonic())] * self.size
        first, stuck = "", ""
        while True:
            result.done.wait(_ROUND_SECONDS)
            own = (progress.count, progress.doing, result.done.is_set(), result.problem, stuck)
            try:
                heard = self.gather(own)
            except RuntimeError as error:
                progress.fail()
                self._lost = f"{what}: {first or f'a rank was lost or did not answer ({_first_line(error)})'}"
                raise RunError(self._lost) from error
            # What is said first is the cause; what peers say later may be its consequence.
            first = first or next((f"rank {rank}: {problem}" for rank, (_, _, _, problem, _) in enumerate(heard) if problem), "")
            if first:
                progress.fail()
            if all(done for _, _, done, _, _ in heard):
                thread.join()
                if first:
                    raise RunError(f"{what}: {first}") from result.error
                return self.gather(result.value)
            # Clocks differ by a moment: a rank that is given up is so in the round after, by all at once.
            if given_up := next((said for *_, said in heard if said), ""):
                progress.fail()
                self._lost = f"{what}: {first or given_up}"
                raise RunError(self._lost) from result.error
            now = time.monotonic()
            seen = [(count, then if count == before else now) for (before, then), (count, *_) in zip(seen, heard, strict=True)]
            for rank, (_, doing, done, _, _) in enumerate(heard):
                if not done and now - seen[rank][1] > self._seconds:
                    stuck = f"rank {rank} has made no progress for {self._seconds:g} s" + (f" ({doing})" if doing else "")
                    break


class _Result(Generic[T]):
    def __init__(self) -> None:
        self.value: T | None = None
        self.problem = ""
        self.error: Exception | None = None
        self.done = threading.Event()

    def of(self, work: Callable[[Beat], T], progress: Beat) -> None:
        try:
            self.value = work(progress)
        except Exception as error:  # libraries that write for us raise errors of their own kinds; the other ranks must hear of any
            self.error, self.problem = error, describe(error)
        finally:
            self.done.set()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]
