"""Ctrl-C that falls into a finalizer."""

from __future__ import annotations

import signal
import sys
import threading
import weakref

import pytest

from fw.cli import interrupts


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
