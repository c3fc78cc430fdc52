"""What happens to memory while a stretch of code runs."""

from __future__ import annotations

from typing import NamedTuple


class Event(NamedTuple):
    """Something that happened.

    Attributes:
        name: of a mark or a collective; empty for an allocation or its end.
        nbytes: that were allocated; negative for freed.
        converted: address of what is converted where this is allocated, or 0.
        inside: allocated in a collective.
        own: and by its backend, for itself.
        exchanged: addresses of what a collective takes.
        began: when a thread of gloo began what it has done now, or what this is allocated in.
        line: of the Python program that allocated; empty where it was not asked for.
        unfilled_bytes: of a GPU's block, what nobody has asked for.
    """

    time: int
    name: str = ""
    address: int = 0
    nbytes: int = 0
    converted: int = 0
    inside: bool = False
    own: bool = False
    exchanged: tuple[int, ...] = ()
    began: int = 0
    line: str = ""
    unfilled_bytes: int = 0
