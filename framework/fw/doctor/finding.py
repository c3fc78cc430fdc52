"""What a check has found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of a doctor's.

    Attributes:
        area: what it is of.
        state: ``note`` for what works and could be better, or is not there and need not be.
        text: what there is.
        fix: what to do; empty where nothing is to be done.
    """

    area: str
    state: State
    text: str
    fix: str = ""


Check = Callable[[], Iterator[Finding]]


def guarded(area: str, check: Check) -> Iterator[Finding]:
    """What it finds; a check that fails is a finding, too, and takes no other with it."""
    try:
        yield from check()
    except Exception as error:
        yield Finding(area, "problem", f"cannot be looked at: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
