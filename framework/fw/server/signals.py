"""SIGTERM and Ctrl-C where there is no server yet whose requests could be let end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Asked(KeyboardInterrupt):
    """To end. One of these, so that :func:`fw.cli.interrupts.heard` sends it again where a finalizer swallows it."""


@contextmanager
def leaving() -> Iterator[None]:
    """Within it, a signal is an :class:`Asked`. Who has left it so, or at its end, is not asked again: the process is about to end."""
    before = {number: signal.signal(number, _ask) for number in _SIGNALS}
    after: dict[signal.Signals, Any] = dict.fromkeys(_SIGNALS, signal.SIG_IGN)
    try:
        yield
    except Asked:
        raise
    except BaseException:
        after = before
        raise
    finally:
        for number, handler in after.items():
            signal.signal(number, handler)


def _ask(number: int, frame: FrameType | None) -> None:
    raise Asked
