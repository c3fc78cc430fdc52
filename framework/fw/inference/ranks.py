"""Several processes of this host with a part of one model's layers each. The first one schedules, and chooses tokens; the others are told
what to compute, and do it at the same time."""

from __future__ import annotations

import mmap
import os
import pickle
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

from fw.errors import RunError, UserError
from fw.inference.adapters import Adapter
from fw.inference.cached import Piece
from fw.inference.collective import Collective, Group
from fw.inference.divided import Several
from fw.inference.mirrored import Mirrored
from fw.inference.steady import Way
from fw.inference.uninterrupted import uninterrupted
from fw.kernels import meeting
from fw.kernels.meeting import Meeting
from fw.kinds.kv_cache import KVCache
from fw.launching.child import Child
from fw.recipe.inference import InferenceRecipe
from fw.registry import Plugin

OPTION = "inference.tensor"
HERE = "here"
"""What a rank says before it waits for others, and when it has an adapter."""
_PATIENCE_S = 5


@dataclass(frozen=True)
class Start:
    """What a rank must know.

    Attributes:
        threads: that it computes with.
        store: a file by which ranks find one another that do not meet in memory.
    """

    path: str
    recipe: InferenceRecipe
    adapter: str | None
    rank: int
    ranks: int
    threads: int
    store: str

    def joined(self, memory: mmap.mmap | None, device: torch.device) -> Collective:
        """How this rank meets the others."""
        if memory is not None:
            return Meeting(memory, self.rank, self.ranks)
        return Group(self.store, self.rank, self.ranks, device)


def of_others(recipe: InferenceRecipe) -> InferenceRecipe:
    """What ranks but the first prepare: a draft is the first one's."""
    return replace(recipe, inference=replace(recipe.inference, draft="", speculate=0))


class First(Several):
    """Begins the others; they end with it, or with :meth:`close`.

    Args:
        path, recipe, adapter: what all load.

    Raises:
        UserError: there are not as many GPUs, or a plugin is of this process alone.
    """

    def __init__(self, path: str | Path, recipe: InferenceRecipe, adapter: str | Path | None, device: torch.device) -> None:
        ranks = recipe.inference.tensor
        _check_known_to_all(recipe.kv_cache, recipe.quantization)
        on_gpus = device.type == "cuda"
        if on_gpus and (device.index or 0) + ranks > torch.cuda.device_count():
            raise UserError(f"{OPTION}: {ranks} ranks from {device} on want a GPU each, and {torch.cuda.device_count()} are here")
        self.threads = max(1, torch.get_num_threads() // (1 if on_gpus else ranks))
        self._place = tempfile.TemporaryDirectory(prefix="fw-ranks-")
        told = None if adapter is None else _absolute(adapter)
        start = Start(_absolute(path), of_others(recipe), told, 0, ranks, self.threads, str(Path(self._place.name) / "store"))
        in_memory = not on_gpus and meeting.available()
        memory, file = _memory(meeting.memory_bytes(ranks)) if in_memory else (None, -1)
        self._calls: list[tuple[Any, ...]] = []
        self._forgotten: list[int] = []
        self._others: list[_Other] = []
        self._finalizer = weakref.finalize(self, _end, self._others, self._place)
        try:
            for rank in range(1, ranks):
                self._others.append(_Other(replace(start, rank=rank), file))
            for other in self._others if memory is None else ():
                other.wait()  # who is gone would be waited for longer
            self._check()
            super().__init__(0, ranks, OPTION, start.joined(memory, device))
        except BaseException:
            self.close()
            raise
        finally:
            if file >= 0:
                os.close(file)
        for other in self._others:
            other.watch(self.collective)

    @property
    def pids(self) -> list[int]:
        """Of the others."""
        return [other.process.pid for other in self._others]

    @property
    def connections(self) -> list[Connection[Any, Any]]:
        """To the others; between steps, one of which something can be read is of a rank that has ended, or is about to: :meth:`lost`."""
        return [other.connection for other in self._others]

    def lost(self) -> NoReturn:
        """Raises:
        RunError, UserError: what became of the one that is gone.
        """
        self._check(_PATIENCE_S)
        self.close()
        raise RunError("a rank, which computes a part of every layer, hears nothing any more; load the model again")

    def close(self) -> None:
        """End the others, now."""
        self._finalizer()

    def agreed(self, value: int) -> int:
        """This one's."""
        self._tell("agreed", value)
        return value

    def mirrored(self, cache: KVCache) -> KVCache:
        """The cache, and the others' besides, for whoever gives places in it."""
        return Mirrored(cache, self._calls.append)

    @contextmanager
    def step(self, pieces: Sequence[Piece], way: Way) -> Iterator[None]:
        """The others compute the same, the same way. An interrupt waits for the end of the step, so that all are as far afterwards."""
        told = [
            (p.stretch.sequence, p.stretch.start, p.tokens, p.wanted, p.scored, None if p.adapter is None else p.adapter.number)
            for p in pieces
        ]
        calls, forgotten = self._calls[:], self._forgotten[:]
        del self._calls[: len(calls)], self._forgotten[: len(forgotten)]
        with uninterrupted():
            try:
                self._tell("step", calls, forgotten, way, told)
                yield
                self._check()
            except BaseException as error:
                self._check(_PATIENCE_S if isinstance(error, RuntimeError) and not self.repeatable else 0)
                self.close()  # how far they are is not known
                raise

    def loaded(self, adapter: Adapter, directory: str) -> None:
        """There, too."""
        with uninterrupted():
            self._tell("adapter", adapter.name, _absolute(directory), adapter.number)
            for other in self._others:
                other.wait()  # the directory may be gone as soon as it is said to be loaded
            self._check()
            weakref.finalize(adapter, self._forgotten.append, adapter.number).atexit = False

    def _tell(self, *message: Any) -> None:
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        for other in self._others:
            try:
                other.connection.send_bytes(data)
            except OSError:  # it has closed its end, and may not have ended yet
                self._check(_PATIENCE_S)
                raise
        if not self._finalizer.alive:
            raise RunError("the model's other ranks have been ended; load it again")

    def _check(self, patience: float = 0) -> None:
        """They are all there.

        Args:
            patience: seconds until one that is gone, as an error says, has ended.

        Raises:
            RunError, UserError: one is not; why.
        """
        if not self._finalizer.alive:
            return
        end = time.monotonic() + patience
        while time.monotonic() < end and all(other.process.poll() is None for other in self._others):
            time.sleep(0.01)
        for rank, other in enumerate(self._others, 1):
            if (why := other.why_ended()) is not None:
                self.close()
                if isinstance(why, UserError):
                    raise why
                raise RunError(f"rank {rank}, which computes a part of every layer, {why}; load the model again") from None


class _Other:
    """A process with another rank."""

    def __init__(self, start: Start, file: int) -> None:
        self._told: UserError | str | None = None
        self._child = Child("fw.inference.rank", (file,) if file >= 0 else (), {"TQDM_DISABLE": "1"})
        self.process, self.connection = self._child.process, self._child.connection
        self.connection.send(start.recipe.config)
        self.connection.send(start)

    def watch(self, collective: Collective) -> None:
        """Nobody waits for it when it is gone."""
        threading.Thread(target=_watch, args=(self.process, collective), daemon=True).start()

    def wait(self) -> None:
        """For it to be there, or gone."""
        while not self.connection.poll(0.1) and self.process.poll() is None:
            pass
        with suppress(EOFError, OSError):
            self._heard()

    def why_ended(self) -> str | UserError | None:
        """What became of it; None while it is there."""
        with suppress(EOFError, OSError):
            while self._told is None and self.connection.poll():
                self._heard()
        return self._child.fate(self._told)

    def _heard(self) -> None:
        if (told := self.connection.recv()) != HERE:
            self._told = told

    def end(self) -> None:
        """It has heard enough."""
        self._child.let_go()

    def ended(self) -> None:
        """It has, afterwards."""
        self._child.end(_PATIENCE_S)


def _absolute(directory: str | Path) -> str:
    """What a relative path means may change, and is another thing for processes that began elsewhere."""
    return str(Path(directory).absolute())


def _check_known_to_all(*plugins: Plugin | None) -> None:
    for plugin in plugins:
        of = type(plugin)
        if plugin is not None and (of.__module__ == "__main__" or "<locals>" in of.__qualname__):
            raise UserError(
                f"{plugin.kind}: {of.__name__} is of this script alone, and ranks ({OPTION}) are processes of their own; put it into a file"
                " and name that: plugins: [./FILE.py]"
            )


def _watch(process: subprocess.Popen[bytes], collective: Collective) -> None:
    process.wait()
    collective.end()


def _end(others: list[_Other], place: tempfile.TemporaryDirectory[str]) -> None:
    for other in others:
        other.end()
    for other in others:
        other.ended()
    others.clear()
    place.cleanup()


def _memory(size: int) -> tuple[mmap.mmap, int]:
    """Of zeros, and a file descriptor by which others have it, too."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("fw ranks")
    else:
        handle, name = tempfile.mkstemp()
        os.unlink(name)
        file = handle
    os.ftruncate(file, size)
    return mmap.mmap(file, size), file
