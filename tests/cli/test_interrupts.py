"""Ctrl-C that falls into a finalizer."""

from __future__ import annotations

import signal
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest

from fw.cli import interrupts


@pytest.fixture(autouse=True)
def interrupts_raise() -> Iterator[None]:
    """Also where this process was started to ignore them, as shells do for what they put in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class _Kept:
    pass


def _interrupt_in_a_finalizer() -> None:
    kept = _Kept()
    weakref.finalize(kept, signal.raise_signal, signal.SIGINT)
    del kept


def test_an_interrupt_in_a_finalizer_is_raised_after_it() -> None:
    with interrupts.heard(), pytest.raises(KeyboardInterrupt):
        _interrupt_in_a_finalizer()
        threading.Event().wait(60)


def test_what_else_is_unraisable_goes_where_it_went(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: told.append(unraisable.exc_type))
    before = sys.unraisablehook
    with interrupts.heard():
        kept = _Kept()
        weakref.finalize(kept, int, "no number")
        del kept
    assert told == [ValueError]
    assert sys.unraisablehook is before
