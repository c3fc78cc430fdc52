"""What torch's caching allocator itself has recorded, which the profiler knows in part: it is told how large the blocks are, not how much
was asked for, and hears nothing of what autograd's thread frees between two operators."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from fw.meter.events import Event


class Entry(NamedTuple):
    """An allocation, or (negative) its end, with the bytes that were asked for."""

    time: int
    """In nanoseconds, to a thousand exactly."""
    address: int
    nbytes: int


@contextmanager
def recorded(device: torch.device) -> Iterator[list[Entry]]:
    """The list is filled when the context is closed: all allocations in order. None on the CPU, and where the allocator's history is being
    recorded for another purpose."""
    entries: list[Entry] = []
    if device.type != "cuda" or torch._C._cuda_isHistoryEnabled():
        yield entries
        return
    torch.cuda.memory._record_memory_history(enabled="all", context=None, device=device, clear_history=True)
    try:
        yield entries
        index = torch.cuda.current_device() if device.index is None else device.index
        for entry in torch.cuda.memory._snapshot(device)["device_traces"][index]:
            sign = {"alloc": 1, "free_requested": -1}.get(entry["action"], 0)
            if sign:
                entries.append(Entry(int(entry["time_us"]) * 1000, entry["addr"], sign * entry["size"]))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None, device=device)


def as_recorded(events: Sequence[Event], entries: Iterable[Entry]) -> list[Event]:
    """The profiler's events with the allocator's memory.

    The allocator's order is that of both; what an operator's event says besides is kept, and what the profiler has not seen comes in
    between. Allocations that the allocator does not know of are left out.

    Args:
        events: in the order of time.
    """
    seen = deque(event for event in events if not event.name)
    memory: list[Event] = []
    asked: dict[int, int] = {}
    now, offset = 0, None  # between two clocks, which are read and converted apart
    for address, nbytes, time in ((entry.address, entry.nbytes, entry.time) for entry in entries):
        while offset is not None and seen and not _is(seen[0], address, nbytes) and seen[0].time + _FAR < time + offset:
            seen.popleft()
        if seen and _is(seen[0], address, nbytes):
            event = seen.popleft()
            now, offset = max(now, event.time), event.time - time
            event = event._replace(unfilled_bytes=max(0, event.nbytes - nbytes) if nbytes > 0 else 0)
        else:
            now = max(now, min(time + (offset or 0), seen[0].time) if seen else time + (offset or 0))
            event = Event(now, "", address)
        if nbytes > 0:
            asked[address] = nbytes
        else:
            nbytes = -asked.pop(address, -nbytes)
        memory.append(event._replace(time=now, nbytes=nbytes))
    return list(heapq.merge((event for event in events if event.name), memory, key=lambda event: event.time))


_FAR = 1_000_000
"""Nanoseconds: an event so much older than what the allocator tells now will not be told any more."""


def _is(event: Event, address: int, nbytes: int) -> bool:
    return event.address == address and (event.nbytes > 0) == (nbytes > 0)
