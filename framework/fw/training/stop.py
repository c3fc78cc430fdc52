"""Ctrl-C, SIGTERM and SIGUSR1 ask a run to stop; it finishes its step, saves and ends. A second Ctrl-C ends it at once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from fw.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_REQUEUE

_Handler = Callable[[int, FrameType | None], Any] | int | None
_MEANING = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_REQUEUE, signal.SIGUSR1: EXIT_REQUEUE}
PREEMPTIONS = (signal.SIGTERM, signal.SIGUSR1)
"""What clusters send before they take a machine back; SIGUSR1 is what SLURM's users write into ``--signal``."""


class StopRequest:
    """Remembers the signals this rank got; what all ranks make of them is decided once a step, so that they stop after the same one.

    Args:
        grace: seconds from a preemption to the end, whatever is done by then; 0 for as long as it takes.
        give_up: called in a thread when they are over.
    """

    def __init__(self, grace: float = 0, give_up: Callable[[], None] = lambda: None) -> None:
        self.exit_code = EXIT_OK
        """What the ranks decided: nothing yet, Ctrl-C (130) or preemption (75)."""
        self._asked: dict[int, float] = {}
        self._before: dict[int, _Handler] = {}
        self._grace, self._give_up = grace, give_up
        self._alarm: threading.Timer | None = None

    @property
    def decided(self) -> bool:
        """Whether the ranks are to stop."""
        return self.exit_code != EXIT_OK

    def votes(self) -> list[float]:
        """One number per signal, to be summed over ranks."""
        return [float(number in self._asked) for number in _MEANING]

    def decide(self, sums: Sequence[float]) -> None:
        """Take the sums over ranks of :meth:`votes`."""
        for code, votes in zip(_MEANING.values(), sums, strict=True):
            if votes and not self.decided:
                self.exit_code = code
        if self.exit_code == EXIT_REQUEUE:
            self._set_alarm()  # also on a rank that got no signal itself

    def listen(self) -> None:
        """Take over the handlers, which a process has for its main thread alone: a run in another one is stopped by nobody's signal."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _MEANING:
            before = signal.signal(number, self._ask)
            self._before.setdefault(number, before)

    def ignore(self) -> None:
        """Give the handlers back, and the alarm up."""
        if self._alarm is not None:
            self._alarm.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in self._asked:
            raise KeyboardInterrupt
        self._asked.setdefault(number, time.monotonic())
        if number in PREEMPTIONS:
            self._set_alarm()

    def _set_alarm(self) -> None:
        if self._grace and self._alarm is None:
            self._alarm = threading.Timer(self._grace, self._give_up)
            self._alarm.daemon = True
            self._alarm.start()
