"""Memory that a thread of gloo frees, of which no recording tells: by hand, in a made-up course of events."""

from __future__ import annotations

import torch

from fw.meter.account import Rules
from fw.meter.allocations import Allocations, Event, with_unseen_ends

CLONE = Event(1, "", address=16, nbytes=100, inside=True)
NEXT = Event(30, "", address=32, nbytes=7)


def peak(*events: Event) -> int:
    found = Allocations(torch.device("cpu"))
    found.replay(with_unseen_ends(list(events)), Rules())
    return found.history.account().peak_bytes


def done(began: int, ended: int) -> Event:
    """A collective, told when it has ended."""
    return Event(ended, "gloo:all_gather", began=began)


def test_what_nobody_frees_goes_with_the_collective() -> None:
    assert peak(CLONE, done(2, 10), NEXT) == 100
    assert peak(CLONE, Event(5, "", address=48, nbytes=7), done(2, 10), NEXT) == 107


def test_where_its_address_is_used_again_it_has_gone_before() -> None:
    again = Event(20, "", address=16, nbytes=60)
    assert peak(CLONE, done(2, 10), again, NEXT) == 100
    # gloo tells late: what has the address now stays, and nothing is there twice.
    early = Event(5, "", address=16, nbytes=60)
    assert peak(CLONE, early, done(2, 10), Event(30, "", address=32, nbytes=50)) == 60 + 50
