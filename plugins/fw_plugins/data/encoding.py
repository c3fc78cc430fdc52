"""Records become ids: in order, by as many processes as there are cores where there are many, and noted down as they come, so that who is
interrupted goes on where it was.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from fw.api import RunError, usable_cores

ALONE = 1024
"""So many records are encoded before processes are started for the others, which takes a second or two."""
BATCH = 256
_WORK = "from fw_plugins.data.encoding import work; work()"


class Outcome(NamedTuple):
    """What came of a record.

    Attributes:
        content: its hash, in hexadecimal digits; of one that is left out, nothing.
        parts: ids, and what of them is learnt, of each of its parts.
        wrong: what is wrong with it, as a clause; empty where nothing is.
    """

    content: str
    parts: Sequence[tuple[Sequence[int], Sequence[int]]]
    wrong: str


Value = Mapping[str, Any]
Encode = Callable[[Value], Outcome]


class Journal:
    """Outcomes in a file, a line each."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def kept(self) -> Iterator[Outcome]:
        """Of an earlier call; a line that is not whole, as a kill leaves it, is cut off."""
        if not self._file.exists():
            return
        whole = 0
        with self._file.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                yield Outcome(*json.loads(line))
        os.truncate(self._file, whole)

    @contextmanager
    def added(self) -> Iterator[Callable[[Sequence[Outcome]], None]]:
        """Takes outcomes, which are in the file when it returns."""
        with self._file.open("ab") as file:

            def add(outcomes: Sequence[Outcome]) -> None:
                file.write(b"".join(json.dumps(outcome).encode() + b"\n" for outcome in outcomes))
                file.flush()

            yield add

    def remove(self) -> None:
        """It is needed no more."""
        self._file.unlink(missing_ok=True)


def outcomes(values: Iterator[Value], encode: Encode, made_by: tuple[type, Any], journal: Journal) -> Iterator[Outcome]:
    """Of each, in order; those in the journal are not encoded again.

    Args:
        encode: does one.
        made_by: what makes it in another process: a class, of which ``encoder(config)`` gives it, and the config.

    Raises:
        RunError: a process that encodes has ended.
    """
    for outcome in journal.kept():
        next(values, None)
        yield outcome
    with journal.added() as add:
        for batch in _batches(islice(values, ALONE)):
            found = [encode(value) for value in batch]
            add(found)
            yield from found
        for found in _by_many(_batches(values), encode, made_by):
            add(found)
            yield from found


def _batches(values: Iterator[Value]) -> Iterator[list[Value]]:
    while batch := list(islice(values, BATCH)):
        yield batch


def _by_many(batches: Iterator[list[Value]], encode: Encode, made_by: tuple[type, Any]) -> Iterator[list[Outcome]]:
    first = list(islice(batches, 1))
    if not first:
        return
    count = usable_cores()
    if count < 2 or not _found_elsewhere(made_by[0]):
        for batch in (*first, *batches):
            yield [encode(value) for value in batch]
        return
    workers = deque(_Worker(made_by) for _ in range(count))
    asked: deque[_Worker] = deque()
    try:
        for batch in _chain(first, batches):
            if not workers:  # who was asked first answers first, and is asked again
                workers.append(asked.popleft())
                yield workers[0].answer()
            worker = workers.popleft()
            worker.ask(batch)
            asked.append(worker)
        while asked:
            workers.append(asked.popleft())
            yield workers[-1].answer()
    finally:
        for worker in (*workers, *asked):
            worker.end()


def _chain(first: Iterable[list[Value]], others: Iterator[list[Value]]) -> Iterator[list[Value]]:
    yield from first
    yield from others


def _found_elsewhere(kind: type) -> bool:
    """Whether another process can import it: not what a file of somebody's has registered."""
    try:
        return importlib.util.find_spec(kind.__module__) is not None and kind.__module__ != "__main__"
    except (ImportError, ValueError):
        return False


class _Worker:
    """A process that is asked and answers in turn, so that neither ever waits for the other to read."""

    def __init__(self, made_by: tuple[type, Any]) -> None:
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-c", _WORK]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._write(made_by)

    def ask(self, batch: list[Value]) -> None:
        self._write(batch)

    def answer(self) -> list[Outcome]:
        assert self._process.stdout is not None
        try:
            return [Outcome(*each) for each in pickle.load(self._process.stdout)]
        except (EOFError, pickle.UnpicklingError):
            raise self._ended() from None

    def _write(self, what: Any) -> None:
        assert self._process.stdin is not None
        try:
            pickle.dump(what, self._process.stdin)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _ended(self) -> RunError:
        return RunError(f"data: a process that encodes records has ended with exit code {self._process.wait()}; what was encoded is kept")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue


def work() -> None:
    """Answer what is asked on stdin, until it ends. What anything else prints goes to stderr."""
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    kind, config = pickle.load(asked)
    encode: Encode = kind(config).encoder()
    while True:
        try:
            batch = pickle.load(asked)
        except EOFError:
            return
        pickle.dump([tuple(encode(value)) for value in batch], answers)
        answers.flush()
