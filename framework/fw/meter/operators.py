"""Where the time of one step goes, operator by operator, by the events of torch.profiler.

On the CPU the step is what its thread does: each moment belongs to the innermost operator that runs, and where none does to whom the thread
waits for. On a GPU it is what the GPU does: each moment belongs to a kernel, and through it to the operator that launched it.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from fw.meter.intervals import length, union, without
from fw.meter.operator_flops import operator_flops
from fw.meter.transfers import TO_GPU, TO_HOST, Transfer, transfer

STEP = "fw.meter.traced step"
"""Name of the mark around what is traced."""

_DTYPES = {"float": "float32", "c10::BFloat16": "bfloat16", "c10::Half": "float16", "c10::Float8_e4m3fn": "float8"}
_DTYPES |= {"c10::Float8_e5m2": "float8", "double": "float64"}
_SIZES = {"double": 8, "float": 4, "long": 8, "long int": 8, "int": 4, "c10::BFloat16": 2, "c10::Half": 2, "short": 2}
"""Bytes of a number by the profiler's name of its dtype; 1 of all others."""
_ALLOCATION = "[memory]"
_FRAMES = (1, 7)  # RecordScope's BACKWARD_FUNCTION and USER_SCOPE, as the profiler tells them
_FOR_OTHERS = ("aten::empty", "aten::new_empty", "aten::resize_")
"""Operators that allocate what those who call them fill; beginnings of their names."""
_COPIED_BYTES = re.compile(r'"bytes": (\d+)')
_COLLECTIVES = ("c10d::", "_c10d_functional::", "gloo:", "nccl:", "record_param_comms")


class Call(NamedTuple):
    """An event of the profiler.

    Attributes:
        thread: on the CPU; 0 on a GPU.
        shapes, dtypes, values: of the arguments; empty shapes for what is no tensor.
        identity: by which a kernel finds who launched it; ``launched_by`` is that, 0 on the CPU.
        on_gpu: whether the GPU does it.
        nbytes: that are allocated, where the event is an allocation (negative where they are freed), or copied.
    """

    name: str
    begin: int
    end: int
    thread: int = 1
    shapes: Sequence[Sequence[int]] = ()
    dtypes: Sequence[str] = ()
    values: Sequence[Any] = ()
    identity: int = 0
    launched_by: int = 0
    on_gpu: bool = False
    nbytes: int = 0


@dataclass(frozen=True)
class Operator:
    """All calls of an operator with arguments of the same shapes.

    Attributes:
        shapes: of its tensors, in words.
        seconds: of all calls, without what they call in turn.
        flops: of one call, 0 but for products.
        dtype: of what it multiplies, as :data:`fw.meter.devices.DTYPES` has it.
        nbytes: of the tensors that one call is given.
        allocated_bytes: that all calls have allocated, freed or not.
        kind: ``operator``; ``communication``, between ranks; ``copy``, between host and GPU.
    """

    name: str
    shapes: str
    calls: int
    seconds: float
    flops: int
    dtype: str
    nbytes: int
    allocated_bytes: int
    kind: str = "operator"


@dataclass(frozen=True)
class Copies:
    """Between host and GPU, of all that an operator does; its name is that of the outermost, empty where another thread copies."""

    to_host: bool
    operator: str
    times: int
    nbytes: int


@dataclass(frozen=True)
class StepTrace:
    """Of one step.

    Attributes:
        seconds: from begin to end, longer than without a trace.
        operators: those that took longest first. Of a GPU's time only what no kernel of computation ran beside is communication or copy.
        waited_seconds: in which no operator ran, but what ranks exchange was under way.
        idle_seconds: in which nothing ran: Python, the framework, launching.
        copied: between host and GPU.
        transfers: all of it by way, and what offload tells of a disk.
    """

    seconds: float
    operators: Sequence[Operator]
    waited_seconds: float
    idle_seconds: float
    copied: Sequence[Copies] = ()
    transfers: Sequence[Transfer] = ()

    def as_json(self) -> dict[str, Any]:
        """Its attributes."""
        return asdict(self)

    @staticmethod
    def from_json(raw: dict[str, Any]) -> StepTrace:
        """What :meth:`as_json` gave."""
        operators, copied = [Operator(**each) for each in raw["operators"]], [Copies(**each) for each in raw["copied"]]
        transfers = [Transfer(**each) for each in raw.get("transfers", ())]
        return StepTrace(**{**raw, "operators": operators, "copied": copied, "transfers": transfers})


def calls_of(results: Any) -> list[Call]:
    """Of ``profile.profiler.kineto_results``, without what only stands around operators: autograd's functions, marks but :data:`STEP`."""
    return [_call(event) for event in results.events() if not _is_frame(event)]


def _is_frame(event: Any) -> bool:
    """CUDA's own functions count as such, too: their events know what they launch, as an operator's do."""
    if event.device_type() != torch.profiler.DeviceType.CPU:
        return event.is_user_annotation()  # a mark of the host's, drawn over the kernels within it
    if event.name() == STEP:
        return False
    return event.scope() in _FRAMES or event.name().startswith("autograd::engine::") or event.linked_correlation_id() > 0


def _call(event: Any) -> Call:
    is_allocation = event.name() == _ALLOCATION
    on_gpu = event.device_type() != torch.profiler.DeviceType.CPU and not is_allocation
    begin = event.start_ns()
    copied = _COPIED_BYTES.search(event.metadata_json()) if on_gpu and event.name().startswith("Memcpy") else None
    return Call(
        event.name(),
        begin,
        begin + event.duration_ns(),
        0 if on_gpu else event.start_thread_id(),
        event.shapes(),
        event.dtypes(),
        event.concrete_inputs(),
        event.correlation_id(),
        event.linked_correlation_id() if on_gpu else 0,
        on_gpu,
        event.nbytes() if is_allocation else int(copied[1]) if copied else 0,
    )


def step_trace(calls: Iterable[Call]) -> StepTrace:
    """Of what ran between begin and end of the mark :data:`STEP`, the last of several."""
    calls = list(calls)
    step = [call for call in calls if call.name == STEP and not call.on_gpu][-1]
    inside = [call for call in calls if step.begin <= call.begin < step.end and call.name != STEP]
    kernels = [call for call in calls if call.on_gpu and call.begin >= step.begin]  # the last ones run when the host is done
    # Of a GPU, backward is launched by a thread of autograd's.
    threads = {call.thread for call in inside if not call.on_gpu} if kernels else {step.thread}
    operators: list[Call] = []
    parents: list[int | None] = []
    allocated: list[int] = []
    for thread in sorted(threads):
        own = [call for call in inside if not call.on_gpu and call.thread == thread]
        called = [call for call in own if call.name != _ALLOCATION]
        inner = _parents(called)
        allocated += _allocated(called, inner, [call for call in own if call.name == _ALLOCATION and call.nbytes > 0])
        parents += [None if parent is None else parent + len(operators) for parent in inner]
        operators += called
    flops = _innermost_flops(operators, parents)
    if kernels:
        return _of_gpu(step, operators, parents, flops, allocated, kernels)
    seconds = [float(call.end - call.begin) for call in operators]
    for place, parent in enumerate(parents):
        if parent is not None:
            seconds[parent] -= operators[place].end - operators[place].begin
    exchanged = [(call.begin, min(call.end, step.end)) for call in inside if call.thread != step.thread and _is_collective(call.name)]
    ran = union((call.begin, call.end) for call, parent in zip(operators, parents, strict=True) if parent is None)
    unused = without([(step.begin, step.end)], ran)
    idle = without(unused, union(exchanged))
    kinds = ["communication" if _is_collective(call.name) else "operator" for call in operators]
    timed = list(zip(operators, seconds, kinds, strict=True))
    return StepTrace(
        (step.end - step.begin) / 1e9,
        _grouped(timed, flops, allocated),
        (length(unused) - length(idle)) / 1e9,
        length(idle) / 1e9,
    )


def _of_gpu(
    step: Call,
    operators: Sequence[Call],
    parents: Sequence[int | None],
    flops: Sequence[int],
    allocated: Sequence[int],
    kernels: Sequence[Call],
) -> StepTrace:
    """The GPU ends after the host: its last kernel is the end of the step."""
    end = max(step.end, *(kernel.end for kernel in kernels))
    launched = {call.identity: place for place, call in enumerate(operators)}
    computing = union((kernel.begin, kernel.end) for kernel in kernels if _kind(kernel.name) == "operator")
    exchanging = union((kernel.begin, kernel.end) for kernel in kernels if _kind(kernel.name) == "communication")
    copying = union((kernel.begin, kernel.end) for kernel in kernels if _kind(kernel.name) == "copy")
    by_place: Counter[int] = Counter()
    copied: dict[tuple[bool, str], list[int]] = defaultdict(list)
    moved: dict[str, list[tuple[tuple[int, int], int]]] = defaultdict(list)
    for kernel in kernels:
        kind = _kind(kernel.name)
        place = launched.get(kernel.launched_by)
        if kind == "copy":
            to_host = "DtoH" in kernel.name
            copied[to_host, _outermost(operators, parents, place)].append(kernel.nbytes)
            moved[TO_HOST if to_host else TO_GPU].append(((kernel.begin, kernel.end), kernel.nbytes))
        elif kind == "operator" and place is not None:
            by_place[place] += kernel.end - kernel.begin
    # Kernels of several streams may run at once: their shares are of the time in which any does.
    total = sum(by_place.values())
    scale = length(computing) / total if total else 0.0
    timed = [(call, by_place[place] * scale, "operator") for place, call in enumerate(operators)]
    busy = union([*computing, *exchanging, *copying])
    exposed = length(without(exchanging, computing))
    copies = length(without(copying, union([*computing, *exchanging])))
    found = _grouped(timed, flops, allocated)
    extra = [
        Operator(name, "", 1, nanoseconds / 1e9, 0, "float32", 0, 0, kind)
        for name, nanoseconds, kind in (("NCCL", exposed, "communication"), ("copies between host and GPU", copies, "copy"))
        if nanoseconds
    ]
    idle = length(without([(step.begin, end)], busy))
    made = [Copies(to_host, operator, len(sizes), sum(sizes)) for (to_host, operator), sizes in copied.items()]
    by_way = [transfer(way, pieces) for way, pieces in sorted(moved.items())]
    return StepTrace((end - step.begin) / 1e9, sorted([*found, *extra], key=lambda each: -each.seconds), 0.0, idle / 1e9, made, by_way)


def _outermost(operators: Sequence[Call], parents: Sequence[int | None], place: int | None) -> str:
    """Name of the operator at the top of that at ``place``; empty where another thread launched."""
    while place is not None and (parent := parents[place]) is not None:
        place = parent
    return operators[place].name if place is not None else ""


def _kind(kernel: str) -> str:
    if kernel.startswith("nccl"):
        return "communication"
    return "copy" if kernel.startswith("Memcpy") and ("HtoD" in kernel or "DtoH" in kernel) else "operator"


def _is_collective(name: str) -> bool:
    return name.startswith(_COLLECTIVES)


def _parents(calls: Sequence[Call]) -> list[int | None]:
    """For each call of a thread the place of the one it runs in; None where there is none."""
    parents: list[int | None] = [None] * len(calls)
    open_calls: list[int] = []
    for place in sorted(range(len(calls)), key=lambda place: (calls[place].begin, -calls[place].end)):
        while open_calls and calls[open_calls[-1]].end < calls[place].end:
            open_calls.pop()
        while open_calls and calls[open_calls[-1]].end <= calls[place].begin < calls[place].end:
            open_calls.pop()
        parents[place] = open_calls[-1] if open_calls else None
        open_calls.append(place)
    return parents


def _innermost_flops(calls: Sequence[Call], parents: Sequence[int | None]) -> list[int]:
    """Each product once: of an operator that calls one, it is the latter's."""
    flops = [_flops(call) for call in calls]
    for place, parent in enumerate(parents):
        while flops[place] and parent is not None:
            flops[parent] = 0
            parent = parents[parent]
    return flops


def _flops(call: Call) -> int:
    """0 also where shapes are not what a formula expects."""
    namespace, _, name = call.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace, None), name, None) if name and namespace in ("aten", "fw") else None
    if packet is None or not call.shapes:
        return 0
    func = getattr(packet, packet.overloads()[0])
    pairs = itertools.zip_longest(call.shapes, call.values)
    values = [tuple(shape) if shape else value for shape, value in pairs]
    args = [value for value, argument in zip(values, func._schema.arguments, strict=False) if not argument.kwarg_only]
    try:
        return operator_flops(func, args)
    except (AssertionError, TypeError, ValueError, IndexError):
        return 0


def _allocated(calls: Sequence[Call], parents: Sequence[int | None], allocations: Iterable[Call]) -> list[int]:
    """Bytes that each call has allocated itself, or by one that only allocates."""
    taken = [0] * len(calls)
    order = sorted(range(len(calls)), key=lambda place: (calls[place].begin, -calls[place].end))
    open_calls: list[int] = []
    following = 0
    for allocation in sorted(allocations, key=lambda call: call.begin):
        while following < len(order) and calls[order[following]].begin <= allocation.begin:
            open_calls.append(order[following])
            following += 1
        while open_calls and calls[open_calls[-1]].end < allocation.begin:
            open_calls.pop()
        inner = next((place for place in reversed(open_calls) if calls[place].end >= allocation.begin), None)
        while inner is not None and calls[inner].name.startswith(_FOR_OTHERS) and (parent := parents[inner]) is not None:
            inner = parent
        if inner is not None:
            taken[inner] += allocation.nbytes
    return taken


def _grouped(timed: Iterable[tuple[Call, float, str]], flops: Sequence[int], allocated: Sequence[int]) -> list[Operator]:
    groups: dict[tuple[Any, ...], list[tuple[float, int]]] = defaultdict(list)
    for place, (call, nanoseconds, kind) in enumerate(timed):
        dtype = next((_DTYPES[name] for name in call.dtypes if name in _DTYPES), "float32")
        nbytes = sum(prod(shape) * _SIZES.get(name, 1) for shape, name in zip(call.shapes, call.dtypes, strict=False) if shape)
        shapes = ", ".join("×".join(map(str, shape)) for shape in call.shapes if shape)
        groups[call.name, shapes, flops[place], dtype, nbytes, kind].append((nanoseconds, allocated[place]))
    found = [
        Operator(name, shapes, len(each), sum(ns for ns, _ in each) / 1e9, flop, dtype, nbytes, sum(taken for _, taken in each), kind)
        for (name, shapes, flop, dtype, nbytes, kind), each in groups.items()
    ]
    return sorted((each for each in found if each.seconds > 0 or each.allocated_bytes), key=lambda each: -each.seconds)
