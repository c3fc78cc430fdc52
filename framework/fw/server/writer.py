"""Lines for somebody who may not read them."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

_MOST = 4 << 20
"""Characters that wait."""


class Writer:
    """Writes to a file in a thread of its own: a pipe that is full and that nobody reads holds up nobody.

    What comes while as much waits as may is lost, as what cannot be written is. Python's own files have locks, which a thread that waits
    in one would hold for ever, and with them the end of the process; hence their descriptors are written to, where they have one.

    Args:
        lost: what is written where lines were lost, given their number.
        most: characters that may wait.
    """

    def __init__(self, out: TextIO, lost: Callable[[int], str] = lambda count: "", most: int = _MOST) -> None:
        self._out, self._most, self._tell_lost = out, most, lost
        try:
            out.flush()
            self._descriptor: int | None = out.fileno()
        except (OSError, ValueError):  # a notebook's, or one that is closed
            self._descriptor = None
        self._waiting: deque[str] = deque()
        self._size, self._lost, self._closed = 0, 0, False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="writer", daemon=True)
        self._thread.start()

    def write(self, text: str) -> None:
        """It is going to be written, unless too much waits already."""
        with self._changed:
            if self._closed or self._size + len(text) > self._most:
                self._lost += 1
                return
            self._put(text)

    def flush(self) -> None:
        """Nobody waits."""

    def close(self, seconds: float) -> None:
        """Nothing more is written; what waits is, unless that takes longer than so."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(seconds)

    def _put(self, text: str) -> None:
        self._waiting.append(text)
        self._size += len(text)
        self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                text = self._waiting[0]
            with suppress(OSError, ValueError):
                self._write(text)
            with self._changed:
                self._waiting.popleft()
                self._size -= len(text)
                if self._lost and not self._waiting:
                    count, self._lost = self._lost, 0
                    self._put(self._tell_lost(count))

    def _write(self, text: str) -> None:
        if self._descriptor is None:
            self._out.write(text)
            self._out.flush()
            return
        content = text.encode("utf-8", "backslashreplace")
        while content:
            content = content[os.write(self._descriptor, content) :]
