"""Bytes that were asked for, where the profiler is told of the blocks they were put into."""

from __future__ import annotations

from fw.meter.allocations import Event, as_asked_for

BLOCK, ASKED = 1024, 700


def test_allocations_and_their_ends_have_what_was_asked_for() -> None:
    events = [
        Event(1, "", 16, BLOCK),
        Event(2, "a mark"),
        Event(3, "", 16, -BLOCK),
        Event(4, "", 16, BLOCK),
        Event(5, "", 99, BLOCK),
        Event(6, "", 7, -512),
        Event(7, "", 16, -BLOCK),
    ]
    found = as_asked_for(events, [(16, ASKED), (16, ASKED + 1), (33, 5)])
    assert [event.nbytes for event in found] == [ASKED, 0, -ASKED, ASKED + 1, BLOCK, -512, -ASKED - 1]
    assert [event._replace(nbytes=0) for event in found] == [event._replace(nbytes=0) for event in events]


def test_what_cannot_have_been_asked_for_is_left() -> None:
    """Of an allocation that the recording has missed the next one's bytes may be larger than its block."""
    assert [event.nbytes for event in as_asked_for([Event(1, "", 16, 512)], [(16, 4096)])] == [512]
