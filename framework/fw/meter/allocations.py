"""What a stretch of code takes from torch's allocator, and for what, by the allocator's own events."""

from __future__ import annotations

import bisect
import functools
import gc
import sysconfig
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fw.meter.account import Block, History, Recorder, Rules, Site, is_given
from fw.meter.allocator_trace import as_recorded, recorded
from fw.meter.earlier import Earlier, in_one_piece
from fw.meter.events import Event


class Allocations(Recorder):
    """Bytes beyond those that were allocated at the beginning; the history has what is :meth:`known` besides.

    Attributes:
        peak_bytes: the most at any time.
        left_bytes: at the end; negative where more was freed than taken.
        marks: by name, at the time of :meth:`mark`.
    """

    def __init__(self, device: torch.device, earlier: Earlier | None = None) -> None:
        self.peak_bytes = 0
        self.left_bytes = 0
        self.marks: dict[str, int] = {}
        self._device = device
        self._earlier = {} if earlier is None else earlier.still(device)
        self._before = 0
        self._history = History()
        self._named: list[tuple[str, frozenset[int]]] = []
        """A category, and addresses of the memory that is of it from this moment on; no addresses for all that is unnamed."""
        self._known: dict[int, Block] = {}
        """Memory that was there before, by address."""

    def began(self) -> None:
        """Of a GPU, what its allocator has given out by now."""
        if self._device.type == "cuda":
            self._before = torch.cuda.memory_allocated(self._device) - sum(self._earlier.values())

    def mark(self, name: str) -> None:
        """Remember how much is allocated now."""
        _leave_trace(f"{_MARK}{name}")

    def enter(self, module: str) -> None:
        """In the order of time."""
        _leave_trace(f"{_ENTER}{module}")

    def known(self, category: str, tensors: Iterable[Tensor]) -> None:
        """Those on the device."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            # Else it lies in a file or is another library's.
            if tensor.device.type == self._device.type and storage.nbytes() and storage.resizable():
                address = storage.data_ptr()
                if address not in self._earlier:
                    self._known.setdefault(address, Block(storage.nbytes(), category, address=address))

    def known_rest(self, category: str) -> None:
        """Of every tensor Python knows of whose memory is one allocation."""
        self.known(category, list(in_one_piece()))

    def name(self, category: str, tensors: Iterable[Tensor]) -> None:
        """By their addresses now."""
        addresses = frozenset(t.untyped_storage().data_ptr() for t in tensors if t.device.type == self._device.type)
        if addresses:
            self._named.append((category, addresses))
            _leave_trace(f"{_NAME}{len(self._named) - 1}")

    def name_rest(self, category: str) -> None:
        """In the order of time."""
        self._named.append((category, frozenset()))
        _leave_trace(f"{_NAME}{len(self._named) - 1}")

    @property
    def history(self) -> History:
        """With what is known before the first change."""
        return self._history

    def replay(self, events: Iterable[Event], rules: Rules) -> None:
        """Fill in what happened, in the order of time."""
        history, live = self._history, dict(self._known)
        history.before = list(live.values())
        if (unknown := self._before - sum(block.nbytes for block in history.before)) > 0:  # workspaces, and what blocks are not filled with
            history.before.append(Block(unknown, rules.unknown))
        unfilled: dict[int, Block] = {}
        now, site = 0, Site()
        for event in events:
            if event.name.startswith(_MARK):
                site = Site(phase=event.name.removeprefix(_MARK))
                history.mark(site.phase)
                self.marks[site.phase] = now
            elif event.name.startswith(_ENTER):
                site = Site(event.name.removeprefix(_ENTER), site.phase)
            elif event.name.startswith(_NAME):
                category, addresses = self._named[int(event.name.removeprefix(_NAME))]
                for block in (live[a] for a in addresses if a in live) if addresses else live.values():
                    block.name(category)
            elif event.exchanged:
                for address in event.exchanged:
                    if address in live:
                        live[address].exchange(rules.exchanged)
            elif not event.name:
                now += event.nbytes
                if event.nbytes > 0:
                    of = live[event.converted].category if event.converted in live else ""
                    if event.address in live:  # its end was not seen
                        now -= live[event.address].nbytes
                        history.went(live[event.address])
                        if event.address in unfilled:
                            history.went(unfilled.pop(event.address))
                    made = Block(event.nbytes, site=site, address=event.address, line=event.line)
                    live[event.address] = history.came(made)
                    if of in rules.copies:
                        live[event.address].name(rules.copies[of])
                    if event.unfilled_bytes:
                        unfilled[event.address] = history.came(Block(event.unfilled_bytes, rules.unknown, site=site))
                    if event.own:
                        made.name(rules.exchanged)
                    elif event.inside:
                        made.exchange(rules.exchanged)
                elif event.address in live:
                    history.went(live.pop(event.address))
                    if event.address in unfilled:
                        history.went(unfilled.pop(event.address))
                self.peak_bytes = max(self.peak_bytes, now)
        self.left_bytes = now


_MARK = "fw.meter.mark:"
_NAME = "fw.meter.name:"
_ENTER = "fw.meter.enter:"


@contextmanager
def allocations(
    device: torch.device, rules: Rules | None = None, lines: bool = False, earlier: Earlier | None = None
) -> Iterator[Allocations]:
    """Record allocations on ``device`` while the context is open; what it gives is filled at the end.

    The sums are of what was asked for, in the order of time: no rounding, no caching (profile_memory of torch.profiler). What is
    garbage at the beginning is collected before, or a collection in between would free memory that the code has not taken.

    Args:
        lines: whether each is to know the line of Python that made it; the program is several times slower.
        earlier: what the process had before, and is left out.
    """
    rules = rules or Rules()
    gc.collect()
    found = Allocations(device, earlier)
    # Shapes come with addresses, which say what is converted and what is exchanged.
    how: dict[str, Any] = {"profile_memory": True, "record_shapes": rules != Rules(), "with_stack": lines}
    with recorded(device) as entries, profile(activities=[ProfilerActivity.CPU], **how) as record:
        found.began()
        yield found
    assert record.profiler is not None and record.profiler.kineto_results is not None
    tree = record.profiler.kineto_results.experimental_event_tree()
    events = sorted(_events(tree, device, rules), key=lambda event: event.time)
    if entries:
        events = as_recorded(events, entries)
    found.replay(with_unseen_ends(events, functools.partial(_uses, tree)), rules)


def _leave_trace(name: str) -> None:
    with torch.profiler.record_function(name):
        pass


def _events(nodes: Iterable[Any], device: torch.device, rules: Rules) -> Iterator[Event]:
    """Marks, collectives and allocations among the nodes of the profiler's tree."""
    waiting = [(node, 0, False, False, 0, "") for node in nodes]
    while waiting:
        node, converted, inside, own, began, line = waiting.pop()
        kind, details = node.typed
        if kind == torch._C._profiler._EventType.Allocation:
            if details.device.type == device.type:
                yield Event(node.start_time_ns, "", details.ptr, details.alloc_size, converted, inside, own, began=began, line=line)
        elif kind == torch._C._profiler._EventType.TorchOp:
            if details.name.startswith((_MARK, _NAME, _ENTER)):
                yield Event(node.start_time_ns, details.name)
            elif details.name == "aten::_to_copy":
                converted = next(_addresses(details.inputs[:1]), 0)
            elif details.name.startswith(_GLOO):  # what a thread of gloo does for a collective
                inside, own, began = True, True, node.start_time_ns
                yield Event(node.end_time_ns, details.name, began=began)
            elif rules.is_exchange(details.name):
                inside, own = True, own or is_given(details.name)
                yield Event(node.start_time_ns, details.name, exchanged=tuple(_addresses(details.inputs)))
        elif kind in (torch._C._profiler._EventType.PyCall, torch._C._profiler._EventType.PyCCall):
            line = _line(details) or line
        waiting += [(child, converted, inside, own, began, line) for child in node.children]


_GLOO = "gloo:"
_FOREIGN = ("torch/", "pytorch_lightning/", "lightning_fabric/", "<")
_LIBRARY = Path(sysconfig.get_paths()["stdlib"])


def _line(call: Any) -> str:
    """Where a call of Python stands; empty where neither who calls nor what is called is a program's own."""
    called = getattr(call, "callsite", None)  # functions in C have no lines
    if called is not None and _is_own(called.file_name):
        return f"{called.file_name}, in {called.function_name} (from line {called.line_number})"
    frame = call.caller
    return f"{frame.file_name}:{frame.line_number}, in {frame.function_name}" if _is_own(frame.file_name) else ""


@functools.cache
def _is_own(file: str) -> bool:
    """Whether a file, named from where it is imported, is neither torch's nor Python's."""
    return not file.startswith(_FOREIGN) and not (_LIBRARY / file).is_file()


def with_unseen_ends(events: list[Event], uses: Callable[[Container[int]], Iterable[tuple[int, int]]] = lambda _: ()) -> list[Event]:
    """What a thread of gloo frees after a collective is in no recording, since that is a thread's own. It shows where its address is used
    again, or where what a collective had is there to the last. It went when that collective was done, the next that gloo began or the one
    it was allocated in, and when the program had used it last.

    Args:
        uses: for some addresses, each that an operator takes, and when it has ended.
    """
    live: dict[int, Event] = {}
    given: dict[int, int] = {}  # address → when a collective had it last
    unseen: list[tuple[Event, int, float]] = []  # with when a collective had it last, and when it was surely gone
    for event in events:
        if is_given(event.name):  # functional collectives call these, and waiting for one takes nothing
            given |= {address: event.time for address in event.exchanged if address in live}
        if event.name:
            continue
        before, when = live.pop(event.address, None), given.pop(event.address, event.time)
        if event.nbytes > 0:
            live[event.address] = event
            if event.inside:
                given[event.address] = event.began or event.time
            unseen += [(before, when, event.time)] if before is not None else []
    unseen += [(live[address], when, inf) for address, when in given.items()]
    if not unseen:
        return events
    done = sorted((event.began, event.time) for event in events if event.name.startswith(_GLOO))
    used: dict[int, list[int]] = {event.address: [] for event, *_ in unseen}
    for address, time in uses(used.keys()):
        used[address].append(time)
    ends = []
    for event, when, gone in unseen:
        after = bisect.bisect_right(done, (when, 0))
        if after < len(done):
            end = max([done[after][1], *(time for time in used[event.address] if event.time < time < gone)])
            if end < gone:  # else it ends where its address is used again, which is another's from then on
                ends.append(Event(end, "", event.address, -event.nbytes))
    return sorted([*events, *ends], key=lambda event: event.time)


def _uses(nodes: Iterable[Any], addresses: Container[int]) -> Iterator[tuple[int, int]]:
    """Those among the addresses that operators in the profiler's tree take, and when these have ended."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        kind, details = node.typed
        if kind == torch._C._profiler._EventType.TorchOp:
            yield from ((address, node.end_time_ns) for address in _addresses(details.inputs) if address in addresses)
        waiting += node.children


def _addresses(inputs: Iterable[Any]) -> Iterator[int]:
    """Of the memory of tensors, and of lists of them, among an operation's arguments."""
    for value in inputs:
        if isinstance(value, list):
            yield from _addresses(value)
        elif address := getattr(value, "storage_data_ptr", None):
            yield address
