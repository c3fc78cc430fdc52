"""One step of a rank more closely than the document has it: memory over time, and by module. Saved beside the document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from fw.meter.account import Block, History
from fw.meter.findings import Finding

POINTS = 600
"""Of a timeline, at most."""


@dataclass(frozen=True)
class Timeline:
    """What is allocated in the course of a step.

    Attributes:
        moved: bytes that were allocated and freed before each point, together: what stands for time, which a plan does not know. Kernels
            make small tensors for themselves by the hundred, and no picture shows them: changes alone would be no measure.
        by_category: bytes at each point; together they are all that is allocated.
        phases: what was moved before each begins, and its name.
    """

    moved: Sequence[int]
    by_category: Mapping[str, Sequence[int]]
    phases: Sequence[tuple[int, str]]

    @staticmethod
    def of(history: History, most: int = POINTS) -> Timeline:
        """With no more points than ``most``, the highest of all among them: of each stretch its lowest and its highest."""
        lines = history.over_time()
        total = sum(lines.values(), np.zeros(len(history.changes) + 1, np.int64))
        moved = np.array([0, *(block.nbytes for block, _ in history.changes)], np.int64).cumsum()
        at = np.arange(len(total))
        if len(at) > most:
            bounds = np.searchsorted(moved, np.linspace(0, int(moved[-1]), most // 2)[1:-1])
            stretches = [stretch for stretch in np.split(at, bounds) if len(stretch)]
            ends = [stretch[end] for stretch in stretches for end in (total[stretch].argmin(), total[stretch].argmax())]
            at = np.union1d(ends, [0, len(total) - 1])
        shown = {category: line[at].tolist() for category, line in lines.items() if line.any()}
        return Timeline(moved[at].tolist(), shown, [(int(moved[changes]), name) for changes, name in history.marks])

    @property
    def total(self) -> list[int]:
        """Bytes at each point."""
        return [sum(line[point] for line in self.by_category.values()) for point in range(len(self.moved))]

    @property
    def peak(self) -> int:
        """The first point at which it is highest."""
        total = self.total
        return total.index(max(total))

    def as_json(self) -> dict[str, Any]:
        """Plain lists."""
        return {"moved": list(self.moved), "by_category": dict(self.by_category), "phases": [list(phase) for phase in self.phases]}

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Timeline:
        """What :meth:`as_json` gave."""
        return Timeline(raw["moved"], raw["by_category"], [(moved, name) for moved, name in raw["phases"]])


def most_by_module(history: History, categories: Container[str]) -> dict[str, int]:
    """The most that these categories take at any time, by the module in which it was made; where that is not known, by ``""``."""
    now: Counter[str] = Counter()
    most: Counter[str] = Counter()
    for block, sign in _changes(history, categories):
        module = block.site.module
        now[module] += sign * block.nbytes
        most[module] = max(most[module], now[module])
    return dict(+most)


def by_module_at(history: History, categories: Container[str], mark: str) -> dict[str, int]:
    """The same, but of what is there at the marks of this name."""
    most: Counter[str] = Counter()
    for changes in (changes for changes, name in history.marks if name == mark):
        now: Counter[str] = Counter()
        for block, sign in _changes(history, categories, changes):
            now[block.site.module] += sign * block.nbytes
        most |= now
    return dict(+most)


def _changes(history: History, categories: Container[str], end: int | None = None) -> Iterator[tuple[Block, int]]:
    """Of these categories, with what was there before as if it had come."""
    for block, sign in chain(((block, 1) for block in history.before), history.changes[:end]):
        if block.category in categories:
            yield block, sign


@dataclass(frozen=True)
class Detail:
    """The step that took most, on the rank that took most.

    Attributes:
        parameters: of the model, over all ranks; a number, not bytes.
        modules: from the embedding to the head, what each keeps in bytes by category.
        findings: what looks like a mistake, on whatever rank.
    """

    rank: int
    parameters: int
    timeline: Timeline
    modules: Mapping[str, Mapping[str, int]]
    findings: Sequence[Finding] = ()

    def as_json(self) -> dict[str, Any]:
        """For a file beside the document's."""
        return {
            "rank": self.rank,
            "parameters": self.parameters,
            "timeline": self.timeline.as_json(),
            "modules": {module: dict(kept) for module, kept in self.modules.items()},
            "findings": [finding.as_json() for finding in self.findings],
        }

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Detail:
        """What :meth:`as_json` gave."""
        findings = [Finding.from_json(each) for each in raw["findings"]]
        return Detail(raw["rank"], raw["parameters"], Timeline.from_json(raw["timeline"]), raw["modules"], findings)
