"""What a stretch of code takes from torch's allocator, by the allocator's own events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass
class Allocations:
    """Bytes beyond those that were allocated at the beginning.

    Attributes:
        peak_bytes: the most at any time.
        left_bytes: at the end; negative where more was freed than taken.
        marks: by name, at the time of :meth:`mark`.
    """

    peak_bytes: int = 0
    left_bytes: int = 0
    marks: dict[str, int] = field(default_factory=dict)

    def mark(self, name: str) -> None:
        """Remember how much is allocated now."""
        with torch.profiler.record_function(f"{_MARK}{name}"):
            pass


_MARK = "fw.meter.mark:"


@contextmanager
def allocations(device: torch.device) -> Iterator[Allocations]:
    """Record allocations on ``device`` while the context is open; what it gives is filled at the end.

    The sums are of what tensors asked for, in the order of time: no rounding, no caching (profile_memory of torch.profiler).
    """
    found = Allocations()
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, profile_memory=True, acc_events=True) as record:
        yield found
    events = record.profiler.kineto_results.events()
    live = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        name = event.name()
        if name == "[memory]" and event.device_type().name.lower() == device.type:
            live += event.nbytes()
            found.peak_bytes = max(found.peak_bytes, live)
        elif name.startswith(_MARK):
            found.marks[name.removeprefix(_MARK)] = live
    found.left_bytes = live
