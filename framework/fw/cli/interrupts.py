"""Ctrl-C is heard wherever it falls."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_AGAIN_S = 0.01


@contextmanager
def heard() -> Iterator[None]:
    """Within it, a ``KeyboardInterrupt`` that Python can't raise is sent again until it is raised.

    Python runs the handler of a signal between any two instructions, and where these are a finalizer's or a weak reference's callback
    the exception has nobody to go to: Python prints "Exception ignored" and goes on. A plan's ledger is told of each tensor's end by such
    a callback, so that one Ctrl-C in a few would be lost.
    """
    before = sys.unraisablehook
    again: list[threading.Timer] = []

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            before(unraisable)
            return
        # Later, and from another thread: raised here it would be ignored as well.
        timer = threading.Timer(_AGAIN_S, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        timer.daemon = True
        again[:] = [timer]
        timer.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
        for timer in again:
            timer.cancel()
