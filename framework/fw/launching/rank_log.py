"""A rank's output goes whole into a file of its own; rank 0's goes to the console as well, whose terminal it keeps."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

LOG_DIR = "FW_LOG_DIR"
"""Environment variable: the directory of the ranks' logs."""

_tees: list[subprocess.Popen[bytes]] = []


def log_file(directory: Path, rank: int | str) -> Path:
    """Where a rank's output is."""
    return directory / f"rank-{rank}.log"


def attach() -> None:
    """Send this rank's output to its log, if its launcher keeps logs. Comes before anything is printed."""
    directory, rank = os.environ.get(LOG_DIR), os.environ.get("RANK")
    if not directory or rank is None:
        return
    file = log_file(Path(directory), rank)
    log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    if rank != "0":
        os.dup2(log, 1)
        os.dup2(log, 2)
        return
    for number, name in ((1, "stdout"), (2, "stderr")):
        console = os.dup(number)
        # Python writes to both itself, so that a progress bar finds its terminal. What C code writes to the descriptor goes through a
        # process that outlives this one, so that the last words of a crash are kept.
        setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(_Both(console, log)), "utf-8", "replace", write_through=True))
        if shutil.which("tee"):
            tee = subprocess.Popen(["tee", "-ai", file], stdin=subprocess.PIPE, stdout=console, start_new_session=True)
            assert tee.stdin is not None
            os.dup2(tee.stdin.fileno(), number)
            tee.stdin.close()
            _tees.append(tee)


def to_log_only(text: str) -> None:
    """A line for this rank's log that the console need not see; the console where there is no log."""
    directory, rank = os.environ.get(LOG_DIR), os.environ.get("RANK")
    if not directory or rank is None:
        print(text, file=sys.stderr)
        return
    with log_file(Path(directory), rank).open("a") as log:
        log.write(text + "\n")


class _Both(io.RawIOBase):
    """Writes to a console and to a log; a terminal if the console is one."""

    def __init__(self, console: int, log: int) -> None:
        self._console, self._log = console, log

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._console)

    def fileno(self) -> int:
        return self._console

    def write(self, data: bytes) -> int:  # type: ignore[override]
        for descriptor in (self._log, self._console):
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        return len(data)
