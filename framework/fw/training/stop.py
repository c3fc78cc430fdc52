"""Ctrl-C and SIGTERM ask a run to stop; it finishes its step, saves and ends. A second Ctrl-C ends it at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from fw.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_REQUEUE

_Handler = Callable[[int, FrameType | None], Any] | int | None
_MEANING = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_REQUEUE}


class StopRequest:
    """Remembers the signals this rank got; what all ranks make of them is decided once a step, so that they stop after the same one."""

    def __init__(self) -> None:
        self.exit_code = EXIT_OK
        """What the ranks decided: nothing yet, Ctrl-C (130) or preemption (75)."""
        self._asked: set[int] = set()
        self._before: dict[int, _Handler] = {}

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

    def listen(self) -> None:
        """Take over the handlers."""
        for number in _MEANING:
            before = signal.signal(number, self._ask)
            self._before.setdefault(number, before)

    def ignore(self) -> None:
        """Give the handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in self._asked:
            raise KeyboardInterrupt
        self._asked.add(number)
