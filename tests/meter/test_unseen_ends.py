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


def test_what_is_allocated_in_a_collective_goes_with_it() -> None:
    own = Event(3, "", address=16, nbytes=100, inside=True, own=True, began=2)
    assert peak(own, done(2, 10), Event(11, "", address=48, nbytes=7), done(12, 20), NEXT) == 100


def test_waiting_for_a_collective_is_none() -> None:
    taken = Event(1, "", address=16, nbytes=100), Event(2, "c10d::alltoall_base_", exchanged=(16,))
    waited = Event(11, "_c10d_functional::wait_tensor", exchanged=(16,))
    assert peak(*taken, done(3, 10), waited, Event(12, "", address=48, nbytes=7), done(13, 20), NEXT) == 100


def test_what_the_program_still_uses_is_there() -> None:
    taken = [Event(1, "", address=16, nbytes=100), Event(2, "c10d::_allgather_base_", exchanged=(16,))]
    events = [*taken, done(3, 10), Event(12, "", address=48, nbytes=7), done(13, 20), NEXT]
    for used, most in ((11, 100), (13, 107), (40, 114)):  # before, between and after what else is allocated
        found = Allocations(torch.device("cpu"))
        found.replay(with_unseen_ends(events, lambda addresses, used=used: [(16, used)] if 16 in addresses else []), Rules())
        assert found.history.account().peak_bytes == most


def test_what_a_backend_takes_for_itself_is_never_called_otherwise() -> None:
    found = Allocations(torch.device("cpu"))
    found.name_rest("activations")
    own, other = (Event(n, "", address=16 * n, nbytes=100, inside=True, own=n == 1) for n in (1, 2))
    found.replay([own, other, Event(5, "fw.meter.name:0")], Rules(exchanged="exchanged"))
    assert [block.category for block, _ in found.history.changes] == ["exchanged", "activations"]


def test_where_its_address_is_used_again_it_has_gone_before() -> None:
    again = Event(20, "", address=16, nbytes=60)
    assert peak(CLONE, done(2, 10), again, NEXT) == 100
    # gloo tells late: what has the address now stays, and nothing is there twice.
    early = Event(5, "", address=16, nbytes=60)
    assert peak(CLONE, early, done(2, 10), Event(30, "", address=32, nbytes=50)) == 60 + 50
