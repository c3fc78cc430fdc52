"""How far predictions are from measurements: what `tools/bench accuracy` makes of two memory documents and of many."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fw.meter.document import COMPONENTS, MemoryDocument, RankMemory

STATE = ("parameters", "gradients", "optimizer")
"""Components that are to be right to the byte."""
TOLERANCE = 0.001
"""Part of a peak by which a measured one may be outside of the predicted range: a few KiB that a process keeps besides."""


@dataclass(frozen=True)
class Score:
    """One configuration, of its rank that took most.

    Attributes:
        measured: highest peak of all measurements, in bytes.
        low, high: the predicted range.
        within: whether every measurement's peaks lie in it, up to :data:`TOLERANCE`.
        off: those of :data:`STATE` that are not right to the byte on some rank.
        component: the one whose maximum is furthest off on some rank.
        component_error: by how much, predicted - measured, as part of the measured peak.
    """

    label: str
    ranks: int
    measured: int
    low: int
    high: int
    within: bool
    predicted_phase: str
    measured_phase: str
    off: tuple[str, ...]
    component: str
    component_error: float

    @property
    def error(self) -> float:
        """(upper end - highest measured) ÷ highest measured; negative where more was taken than predicted."""
        return self.high / self.measured - 1


def score(label: str, predicted: Mapping[str, Any], measured: Sequence[Mapping[str, Any]]) -> Score:
    """Set documents of ``fw plan --json`` and ``fw profile --json`` side by side.

    Raises:
        ValueError: they are of different numbers of ranks.
    """
    plan, profiles = MemoryDocument.from_json(predicted), [MemoryDocument.from_json(each) for each in measured]
    if any(len(profile.per_rank) != len(plan.per_rank) for profile in profiles):
        raise ValueError(f"{label}: {len(plan.per_rank)} ranks were planned, {[len(each.per_rank) for each in profiles]} measured")
    planned, tops = _top(plan), [_top(profile) for profile in profiles]
    highest = max(tops, key=lambda rank: rank.allocated_peak)
    slack = TOLERANCE * highest.allocated_peak
    within = all(
        planned.allocated_peak_low - slack <= top.allocated_peak_low and top.allocated_peak <= planned.allocated_peak + slack
        for top in tops
    )
    differences = dict.fromkeys(COMPONENTS, 0)
    for rank, expected in enumerate(plan.per_rank):
        for name in COMPONENTS:
            for found in (profile.per_rank[rank] for profile in profiles):
                differences[name] = max(differences[name], expected.most[name] - found.most[name], key=abs)
    worst = max(differences, key=lambda name: abs(differences[name]))
    return Score(
        label,
        plan.world_size,
        highest.allocated_peak,
        planned.allocated_peak_low,
        planned.allocated_peak,
        within,
        planned.peak_phase,
        highest.peak_phase,
        tuple(name for name in STATE if differences[name]),
        worst,
        differences[worst] / highest.allocated_peak,
    )


def _top(document: MemoryDocument) -> RankMemory:
    return max(document.per_rank, key=lambda rank: rank.allocated_peak)


@dataclass(frozen=True)
class Summary:
    """Many configurations; errors are parts of the measured peak.

    Attributes:
        underestimate: the most that was taken beyond the upper end; 0 where that never happened.
        overestimate: the most by which the upper end was above the highest measurement.
        within, phases, exact: parts of the configurations.
    """

    number: int
    median: float
    percentile95: float
    underestimate: float
    overestimate: float
    median_above: float
    within: float
    phases: float
    exact: float


def summarise(scores: Sequence[Score]) -> Summary:
    """Of one or more."""
    errors = [each.error for each in scores]
    absolute = [abs(error) for error in errors]
    return Summary(
        len(scores),
        statistics.median(absolute),
        float(np.percentile(absolute, 95)),
        max(0.0, -min(errors)),
        max(0.0, max(errors)),
        statistics.median(errors),
        statistics.mean(each.within for each in scores),
        statistics.mean(each.predicted_phase == each.measured_phase for each in scores),
        statistics.mean(not each.off for each in scores),
    )
