"""What a run was predicted to take beside what it took, component by component."""

from __future__ import annotations

from fw.config import format_size
from fw.meter.document import COMPONENTS, MemoryDocument
from fw.meter.step_memory import StepMemory

Row = tuple[str, int, int]
"""Name, predicted and measured bytes."""


def rows(planned: MemoryDocument, measured: MemoryDocument) -> list[Row]:
    """Of the rank that took most: each component's own maximum, where there is any, and the peaks."""
    took = measured.largest
    expected = planned.per_rank[took.rank]
    found = [(name, expected.most.get(name, 0), took.most.get(name, 0)) for name in COMPONENTS]
    found.append(("allocated", expected.allocated_peak, took.allocated_peak))
    if took.driver_peak:
        found += [("reserved", expected.reserved_peak, took.reserved_peak), ("driver", expected.driver_peak, took.driver_peak)]
    return [row for row in found if row[1] or row[2]]


def values(step: StepMemory, planned: MemoryDocument | None, rank: int) -> dict[str, int]:
    """For a logger: what a rank's step took, and was predicted to take, in bytes."""
    found = {f"memory/{name}": nbytes for name, nbytes in step.most.items()} | {"memory/allocated_peak": step.peak_bytes}
    if planned is not None:
        expected = planned.per_rank[rank]
        found |= {f"memory_planned/{name}": expected.most.get(name, 0) for name in step.most}
        found["memory_planned/allocated_peak"] = expected.allocated_peak
    return found


def lines(planned: MemoryDocument, measured: MemoryDocument) -> list[tuple[str, str]]:
    """A heading, then for each row its name and what there is to say of it."""
    rank = f" of rank {measured.largest.rank}" if measured.world_size > 1 else ""
    said = [
        (name, f"{format_size(expected):>9}  {format_size(took):>9}  {_error(expected, took):>7}")
        for name, expected, took in rows(planned, measured)
    ]
    return [(f"memory{rank}", f"{'planned':>9}  {'measured':>9}"), *((f"  {name}", text) for name, text in said)]


def _error(planned: int, measured: int) -> str:
    """Of the plan, in parts of what was measured."""
    if planned == measured:
        return "exact"
    return f"{planned / measured - 1:+.1%}" if measured else "+100%"
