"""That something takes long, shown while it does: a line that counts on a terminal, a plain one now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 10.0


class Waiting:
    """Call it with what is waited for, as often as you like; as a context, it cleans up the terminal."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._what = ""
        self._begun = self._last = 0.0
        self._bar: tqdm[Any] | None = None

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *args: object) -> None:
        self._end()

    def __call__(self, what: str) -> None:
        """``what`` goes on."""
        now = time.monotonic()
        if what != self._what:
            self._end()
            self._what, self._begun, self._last = what, now, now
            self._say(what)
            if sys.stderr.isatty():
                self._bar = tqdm(desc="waiting", bar_format="{desc}: {elapsed}", file=sys.stderr, leave=False)
        elif self._bar is not None:
            self._bar.refresh()
        elif now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            self._say(f"{what} ({round(now - self._begun)} s)")

    def _end(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
