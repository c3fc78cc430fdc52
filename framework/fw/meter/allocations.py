"""What a stretch of code takes from torch's allocator, and for what, by the allocator's own events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

UNNAMED = "temporary"
"""Category of memory that nobody gave another."""


@dataclass
class Allocations:
    """Bytes beyond those that were allocated at the beginning, but for what :meth:`known` adds.

    Attributes:
        peak_bytes: the most at any time.
        left_bytes: at the end; negative where more was freed than taken.
        marks: by name, at the time of :meth:`mark`.
        at_peak: the peak by category; what is :meth:`known` is part of it, and only of it.
        peak_after: the last mark before the peak; empty for none.
    """

    peak_bytes: int = 0
    left_bytes: int = 0
    marks: dict[str, int] = field(default_factory=dict)
    at_peak: dict[str, int] = field(default_factory=dict)
    peak_after: str = ""

    def __post_init__(self) -> None:
        self._named: list[tuple[str, frozenset[int]]] = []
        """A category, and addresses of the memory that is of it from this moment on; no addresses for all that is unnamed."""
        self._known: dict[int, tuple[str, int]] = {}
        """Memory that was there before, by address: category and bytes."""

    def mark(self, name: str) -> None:
        """Remember how much is allocated now."""
        _leave_trace(f"{_MARK}{name}")

    def known(self, category: str, tensors: Iterable[Tensor]) -> None:
        """These were allocated before, and belong to ``category``; memory that was named before keeps its name."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.resizable():  # else it lies in a file or is another library's
                self._known.setdefault(storage.data_ptr(), (category, storage.nbytes()))

    def name(self, category: str, tensors: Iterable[Tensor]) -> None:
        """What these tensors lie in belongs to ``category``, unless it has one."""
        addresses = frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)
        if addresses:
            self._named.append((category, addresses))
            _leave_trace(f"{_NAME}{len(self._named) - 1}")

    def name_rest(self, category: str) -> None:
        """All that is allocated now and has no category belongs to ``category``."""
        self._named.append((category, frozenset()))
        _leave_trace(f"{_NAME}{len(self._named) - 1}")


_MARK = "fw.meter.mark:"
_NAME = "fw.meter.name:"


@contextmanager
def allocations(device: torch.device, copies: Mapping[str, str] | None = None) -> Iterator[Allocations]:
    """Record allocations on ``device`` while the context is open; what it gives is filled at the end.

    The sums are of what tensors asked for, in the order of time: no rounding, no caching (profile_memory of torch.profiler).

    Args:
        copies: category → category of what is converted from it to another dtype or device.
    """
    found = Allocations()
    # Shapes come with addresses, which say what is converted.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=bool(copies), acc_events=True) as record:
        yield found
    assert record.profiler is not None and record.profiler.kineto_results is not None
    events = sorted(_events(record.profiler.kineto_results.experimental_event_tree()), key=lambda e: e[0])
    _replay(found, events, device, copies or {})


def _leave_trace(name: str) -> None:
    with torch.profiler.record_function(name):
        pass


@dataclass
class _Block:
    """Memory from its allocation to its end."""

    nbytes: int
    category: str = UNNAMED


_Event = tuple[int, str, Any, int]
"""Time; name of a mark, or empty; details of an allocation; address of what is converted where it is allocated, or 0."""


def _events(nodes: Iterable[Any]) -> Iterator[_Event]:
    """Marks and allocations among the nodes of the profiler's tree."""
    waiting = [(node, 0) for node in nodes]
    while waiting:
        node, converted = waiting.pop()
        kind, details = node.typed
        if kind == torch._C._profiler._EventType.Allocation:
            yield node.start_time_ns, "", details, converted
        elif kind == torch._C._profiler._EventType.TorchOp:
            if details.name.startswith((_MARK, _NAME)):
                yield node.start_time_ns, details.name, None, 0
            elif details.name == "aten::_to_copy":
                converted = getattr(details.inputs[0], "storage_data_ptr", None) or 0 if details.inputs else 0
        waiting += [(child, converted) for child in node.children]


def _replay(found: Allocations, events: list[_Event], device: torch.device, copies: Mapping[str, str]) -> None:
    """Fill ``found`` by what happened, in the order of time."""
    before = {address: _Block(nbytes, category) for address, (category, nbytes) in found._known.items()}
    live = dict(before)
    now = peak_index = 0
    mark = ""
    history: list[tuple[_Block, int]] = []
    for _, name, details, converted in events:
        if name.startswith(_MARK):
            mark = name.removeprefix(_MARK)
            found.marks[mark] = now
        elif name:
            category, addresses = found._named[int(name.removeprefix(_NAME))]
            for block in (live[a] for a in addresses if a in live) if addresses else live.values():
                if block.category == UNNAMED:
                    block.category = category
        elif details.device.type == device.type:
            now += details.alloc_size
            if details.alloc_size > 0:
                of = live[converted].category if converted in live else ""
                block = live[details.ptr] = _Block(details.alloc_size, copies.get(of, UNNAMED))
                history.append((block, 1))
            elif details.ptr in live:
                history.append((live.pop(details.ptr), -1))
            if now > found.peak_bytes:
                found.peak_bytes, found.peak_after, peak_index = now, mark, len(history)
    found.left_bytes = now
    sums: Counter[str] = Counter()
    for block in before.values():
        sums[block.category] += block.nbytes
    for block, sign in history[:peak_index]:
        sums[block.category] += sign * block.nbytes
    found.at_peak = dict(sums)
