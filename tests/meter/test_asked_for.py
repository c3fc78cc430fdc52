"""The allocator's own record beside the profiler's: bytes that were asked for, in blocks, and what the profiler has not seen."""

from __future__ import annotations

from fw.meter.allocator_trace import Entry, as_recorded
from fw.meter.events import Event

BLOCK, ASKED = 1024, 700


def test_bytes_are_those_asked_for_and_the_order_the_allocators() -> None:
    events = [
        Event(10_000, "a mark"),
        Event(11_000, "", 16, BLOCK, line="here"),
        Event(20_000, "another"),
        Event(30_000, "", 16, BLOCK),
        Event(31_000, "", 7, -512),
        Event(40_000, "the last"),
    ]
    entries = [  # by a clock that is 5 µs behind
        Entry(6_000, 16, ASKED),
        Entry(18_000, 16, -ASKED),  # by another thread: the profiler does not tell
        Entry(25_000, 16, ASKED + 1),
        Entry(26_000, 7, -500),  # was there before
        Entry(50_000, 16, -ASKED - 1),
    ]
    found = as_recorded(events, entries)
    assert [(event.time, event.name, event.nbytes, event.unfilled_bytes) for event in found] == [
        (10_000, "a mark", 0, 0),
        (11_000, "", ASKED, BLOCK - ASKED),
        (20_000, "another", 0, 0),
        (23_000, "", -ASKED, 0),
        (30_000, "", ASKED + 1, BLOCK - ASKED - 1),
        (31_000, "", -500, 0),
        (40_000, "the last", 0, 0),
        (55_000, "", -ASKED - 1, 0),
    ]
    assert found[1].line == "here"


def test_what_is_not_seen_lies_between_what_is() -> None:
    events = [Event(1_000, "", 16, 512), Event(2_000, "", 32, 512), Event(3_000, "a mark")]
    entries = [Entry(1_000, 16, 512), Entry(9_000, 16, -512), Entry(9_000, 32, 512)]
    assert [(event.time, event.nbytes) for event in as_recorded(events, entries)] == [(1_000, 512), (2_000, -512), (2_000, 512), (3_000, 0)]


def test_an_event_that_the_allocator_does_not_know_holds_nobody_up() -> None:
    events = [Event(1_000, "", 16, 512), Event(2_000, "", 99, 512), Event(5_000_000, "", 32, 512)]
    entries = [Entry(1_000, 16, 512), Entry(5_000_000, 32, 400)]
    assert [(event.address, event.nbytes) for event in as_recorded(events, entries)] == [(16, 512), (32, 400)]


def test_without_a_record_of_the_allocators_there_is_none() -> None:
    assert as_recorded([Event(1, "a mark")], []) == [Event(1, "a mark")]
