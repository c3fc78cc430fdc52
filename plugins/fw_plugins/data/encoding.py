"""Records become ids: in order, by as many processes as there are cores where there are many, and noted down as they come, so that who is
interrupted goes on where it was.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from fw.api import RunError, usable_cores

ALONE = 1024
"""So many records are encoded before processes are started for the others, which takes a second or two."""
BATCH = 256
_MOST = 16
"""Processes: more wait for the one that reads and writes."""
_WORK = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from fw_plugins.data.encoding import work; work()"


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
    """Outcomes in a file, a line each, some ten bytes a token.

    Args:
        made_by: what tells of the code that encodes: another's outcomes are thrown away.
    """

    def __init__(self, file: Path, made_by: str) -> None:
        self._file, self._head = file, json.dumps(made_by).encode() + b"\n"

    def kept(self) -> Iterator[Outcome]:
        """Of an earlier call; what follows a line that is not whole, as a kill leaves it, is cut off."""
        whole = 0
        if self._file.exists():
            with self._file.open("rb") as lines:
                if lines.readline() == self._head:
                    whole = len(self._head)
                    for line in lines:
                        if (outcome := _read(line)) is None:
                            break
                        whole += len(line)
                        yield outcome
        with self._file.open("ab") as file:
            file.truncate(whole)
            if not whole:
                file.write(self._head)

    @contextmanager
    def added(self) -> Iterator[Callable[[Sequence[Outcome]], None]]:
        """Takes outcomes, which are in the file when it returns; those that :meth:`kept` gave come first."""
        with self._file.open("ab") as file:

            def add(outcomes: Sequence[Outcome]) -> None:
                file.write(b"".join(json.dumps(outcome).encode() + b"\n" for outcome in outcomes))
                file.flush()

            yield add

    def remove(self) -> None:
        """It is needed no more."""
        self._file.unlink(missing_ok=True)


def _read(line: bytes) -> Outcome | None:
    """None where it is not what was written."""
    try:
        return Outcome(*json.loads(line)) if line.endswith(b"\n") else None
    except (ValueError, TypeError):
        return None


def code_of(kind: type) -> str:
    """What tells of the code that makes ids: the class, its file's content, and versions of what it stands on."""
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    source = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] if file and Path(file).is_file() else ""
    versions = [importlib.metadata.version(name) for name in ("fw", "tokenizers")]
    return " ".join([kind.__module__, kind.__qualname__, source, *versions])


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
    workers: deque[_Worker] = deque()
    asked: deque[_Worker] = deque()
    try:
        if (count := min(_MOST, usable_cores())) > 1 and _found_elsewhere(made_by[0]):
            workers.extend(_Worker(made_by) for _ in range(count))
        if not (workers and all(worker.begins() for worker in workers)):
            for batch in _chain(first, batches):
                yield [encode(value) for value in batch]
            return
        for batch in _chain(first, batches):
            if not workers:  # who was asked first answers first, and is asked again
                workers.append(asked.popleft())
                yield workers[0].answer()
            worker = workers.popleft()
            asked.append(worker)
            worker.ask(batch, encode)
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
    """Whether another process can import it: not what a file of somebody's has registered, nor what a script or a function has in it."""
    return not kind.__module__.startswith(("__main__", "fw_file_")) and "<locals>" not in kind.__qualname__


class _Worker:
    """A process that is asked and answers in turn, so that neither ever waits for the other to read."""

    def __init__(self, made_by: tuple[type, Any]) -> None:
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-c", _WORK]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._own: list[Outcome] | None = None
        try:
            given = pickle.dumps(made_by)
        except (pickle.PicklingError, AttributeError, TypeError):
            given = b""  # it does not begin
        with suppress(RunError):  # nor does one that has ended by now
            self._write(pickle.dumps((sys.path, given)))

    def begins(self) -> bool:
        """Whether it has found what it is to encode by."""
        assert self._process.stdout is not None
        try:
            return bool(pickle.load(self._process.stdout))
        except (EOFError, pickle.UnpicklingError):
            return False

    def ask(self, batch: list[Value], encode: Encode) -> None:
        """What another process cannot be given is encoded here."""
        try:
            given = pickle.dumps(batch)
        except (pickle.PicklingError, AttributeError, TypeError, RecursionError):
            self._own = [encode(value) for value in batch]
            return
        self._write(given)

    def answer(self) -> list[Outcome]:
        """Of what was asked last."""
        if self._own is not None:
            own, self._own = self._own, None
            return own
        assert self._process.stdout is not None
        try:
            return [Outcome(*each) for each in pickle.load(self._process.stdout)]
        except (EOFError, pickle.UnpicklingError):
            raise self._ended() from None

    def _write(self, pickled: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(pickled)
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
    sys.path[:], given = pickle.load(asked)

    def say(what: Any) -> None:
        pickle.dump(what, answers)
        answers.flush()

    try:
        kind, config = pickle.loads(given)
        encode: Encode = kind(config).encoder()
    except Exception:  # the other process can do it, or says what is wrong
        say(False)
        return
    say(True)
    while True:
        try:
            batch = pickle.load(asked)
        except EOFError:
            return
        say([tuple(encode(value)) for value in batch])
