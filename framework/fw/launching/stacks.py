"""Stacks of ranks that hang: written by the rank itself from C, so that neither a held GIL nor a blocked call keeps them back."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

from fw.launching.outcome import OUTCOME_DIR, launched_by_fw

ASK_SIGNAL = signal.SIGUSR2
"""A rank that gets it writes its stacks and goes on."""
PATIENCE = 1.25
"""Times ``launch.timeout`` without a step after which a rank takes itself for hanging: later than its peers give up on it."""

FATAL = "Fatal Python error"
"""Begins what a rank writes that native code has ended: by SIGABRT, SIGSEGV, SIGBUS, SIGFPE or SIGILL."""

_THREAD = re.compile(r"^(Current thread|Thread) (0x[0-9a-f]+).*\(most recent call first\):")
_MAIN = "main thread "
_open: list[TextIO] = []


def stack_file(directory: Path, rank: int | str) -> Path:
    """Where a rank of fw's launcher writes its stacks."""
    return directory / f"rank-{rank}.stack"


def answer_when_asked() -> None:
    """From now on, write the stacks of all threads on :data:`ASK_SIGNAL` and where native code ends the process.

    For fw's launcher into a file, else to stderr.
    """
    if launched_by_fw():
        file = stack_file(Path(os.environ[OUTCOME_DIR]), os.environ["RANK"]).open("a")
        file.write(f"{_MAIN}{threading.main_thread().ident:#x}\n")
        file.flush()
    else:
        file = os.fdopen(os.dup(2), "w")
    _open[:] = [file]
    faulthandler.register(ASK_SIGNAL, file, all_threads=True)
    if launched_by_fw() or not faulthandler.is_enabled():  # a program that trains may have chosen another file
        faulthandler.enable(file, all_threads=True)


class Watch:
    """Writes this process's stacks if no step ends for a while, and ends it where other ranks wait for it.

    Not armed before the first step has ended, which compiles, nor while :meth:`rest` asks for quiet.
    """

    def __init__(self, timeout_seconds: float, ends_process: bool) -> None:
        self._seconds = timeout_seconds * PATIENCE
        self._ends_process = ends_process
        self._armed = float("-inf")

    def beat(self) -> None:
        """A step has ended. Costs nothing most of the time: the alarm is set anew once in a hundredth of its time."""
        now = time.monotonic()
        if now - self._armed > self._seconds / 100:
            self._armed = now
            file = _open[0] if _open else sys.__stderr__
            faulthandler.dump_traceback_later(self._seconds, exit=self._ends_process, file=file)  # type: ignore[arg-type]

    def rest(self) -> None:
        """What comes now may take as long as it takes: a checkpoint, a first validation, the end of the run."""
        faulthandler.cancel_dump_traceback_later()
        self._armed = float("-inf")


def main_stack(text: str) -> list[str]:
    """The frames of the main thread in the last dump of a stack file, innermost first; empty where there is none."""
    main = next((int(line.removeprefix(_MAIN), 16) for line in text.splitlines() if line.startswith(_MAIN)), None)
    found: list[str] = []
    ours = False
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            ours = int(thread[2], 16) == main
            found = [] if ours else found
        elif ours and line.startswith("  "):
            found.append(line)
        else:
            ours = False
    return found


def main_thread_ended(text: str) -> bool:
    """Whether it was the main thread in which native code ended a process that left this."""
    main = next((int(line.removeprefix(_MAIN), 16) for line in text.splitlines() if line.startswith(_MAIN)), None)
    fatal = text[text.rfind(FATAL) :].splitlines()
    return any(int(thread[2], 16) == main for line in fatal if (thread := _THREAD.match(line)) and thread[1].startswith("Current"))


def waits_for_others(frames: list[str]) -> bool:
    """Whether the innermost frames are torch's collectives: such a rank waits for another one."""
    return any("/torch/distributed/" in frame or "_engine_run_backward" in frame for frame in frames[:2])
