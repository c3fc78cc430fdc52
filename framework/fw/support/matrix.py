"""What is known of pairs of plugins: the runs that proved them, and the sentences that refuse them.

``tools/matrix`` makes the runs, in which every pair of fw's own is, and writes this down. A name of ``offload`` is what goes where, and one
of ``sharding`` may have a stage.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

Level = tuple[str, str]
"""Kind and name."""
Status = Literal["proven", "refused", "independent", "untested"]

FILE = Path(__file__).with_name("matrix.json")
APART: Mapping[Level, str] = {
    ("launcher", "slurm"): "writes a job, in which the run is as it is without",
    ("launcher", "kubernetes"): "writes a job, in which the run is as it is without",
    ("logger", "wandb"): "is given numbers and texts, as `csv` is, and nothing else of the run",
    ("logger", "mlflow"): "is given numbers and texts, as `csv` is, and nothing else of the run",
}
"""Plugins that meet no other, and why."""


@dataclass(frozen=True)
class Refusal:
    """What does not go together.

    Attributes:
        of: two names; of one the usual ones of all other kinds stand beside it, of three no two are refused.
        sentence: that says so, with the reason and the way out.
    """

    of: frozenset[Level]
    sentence: str


@dataclass(frozen=True)
class Runs:
    """Of one sort: training, or generating.

    Attributes:
        kinds: names by kind.
        rows: of runs that were made, a name for each kind.
        refusals: what cannot be together in one.
    """

    kinds: Mapping[str, Sequence[str]]
    rows: Sequence[Mapping[str, str]]
    refusals: Sequence[Refusal]

    @staticmethod
    def of(found: Mapping[str, Any]) -> Runs:
        """What :meth:`as_json` gave."""
        rows = [dict(zip(found["kinds"], row, strict=True)) for row in found["rows"]]
        refusals = [Refusal(frozenset((kind, name) for kind, name in each["of"]), each["sentence"]) for each in found["refused"]]
        return Runs(found["kinds"], rows, refusals)

    def as_json(self) -> dict[str, Any]:
        """In an order that does not depend on who came first."""
        ordered = sorted((sorted(each.of), each.sentence) for each in self.refusals)
        refused = [{"of": [*map(list, of)], "sentence": sentence} for of, sentence in ordered]
        return {"kinds": self.kinds, "rows": sorted([row[kind] for kind in self.kinds] for row in self.rows), "refused": refused}

    @cached_property
    def _proven(self) -> set[frozenset[Level]]:
        return {frozenset(pair) for row in self.rows for pair in combinations(row.items(), 2)}

    @cached_property
    def _refused(self) -> Mapping[frozenset[Level], str]:
        return {each.of: each.sentence for each in self.refusals if len(each.of) < 3}

    def has(self, *levels: Level) -> bool:
        """Whether such runs have a choice of all of these."""
        return all(name in self.kinds.get(kind, ()) for kind, name in levels)

    def proven(self, one: Level, other: Level) -> bool:
        """Whether a run had both."""
        return frozenset((one, other)) in self._proven

    def refusal(self, one: Level, other: Level) -> str | None:
        """The sentence with which these two are refused."""
        found = (self._refused.get(frozenset(of)) for of in ((one, other), (one,), (other,)))
        return next((sentence for sentence in found if sentence is not None), None)


@dataclass(frozen=True)
class Matrix:
    """Of fw's own plugins."""

    training: Runs
    generating: Runs

    @staticmethod
    def read(file: Path = FILE) -> Matrix:
        """From where ``tools/matrix`` wrote it."""
        found = json.loads(file.read_text())
        return Matrix(Runs.of(found["training"]), Runs.of(found["generating"]))

    def write(self, file: Path = FILE) -> None:
        """For :meth:`read`."""
        both = {"training": self.training.as_json(), "generating": self.generating.as_json()}
        file.write_text(_by_lines(both) + "\n")

    @cached_property
    def kinds(self) -> Mapping[str, Sequence[str]]:
        """Names by kind, of both sorts of runs and of none."""
        names: dict[str, dict[str, None]] = {}
        apart: dict[str, list[str]] = {}
        for kind, name in APART:
            apart.setdefault(kind, []).append(name)
        for kinds in (self.training.kinds, self.generating.kinds, apart):
            for kind, some in kinds.items():
                names.setdefault(kind, {}).update(dict.fromkeys(some))
        return {kind: list(some) for kind, some in names.items()}

    @property
    def runs(self) -> int:
        """That were made."""
        return len(self.training.rows) + len(self.generating.rows)

    @property
    def refusals(self) -> Sequence[Refusal]:
        """Of both."""
        return [*self.training.refusals, *self.generating.refusals]

    def refusal(self, one: Level, other: Level) -> str | None:
        """The sentence with which these two are refused, where they are wherever they could meet."""
        where = [runs for runs in (self.training, self.generating) if runs.has(one, other)]
        found = [runs.refusal(one, other) for runs in where if not runs.proven(one, other)]
        return found[0] if found and len(found) == len(where) and None not in found else None

    def status(self, one: Level, other: Level) -> Status:
        """Of two names of different kinds."""
        where = [runs for runs in (self.training, self.generating) if runs.has(one, other)]
        if not where:
            return "independent"
        if any(runs.proven(one, other) for runs in where):
            return "proven"
        return "untested" if self.refusal(one, other) is None else "refused"


def _by_lines(value: Any, depth: int = 0) -> str:
    """JSON in which a row, a kind or a refusal is a line, so that a difference of two is one of these."""
    inside = depth < 3 and isinstance(value, dict | list) and any(isinstance(each, dict | list) for each in _values(value))
    if not inside:
        return json.dumps(value, ensure_ascii=False)
    keys = [f"{json.dumps(key)}: " for key in value] if isinstance(value, dict) else [""] * len(value)
    margin = "\n" + " " * (depth + 1)
    lines = (margin + key + _by_lines(each, depth + 1) for key, each in zip(keys, _values(value), strict=True))
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return begin + ",".join(lines) + "\n" + " " * depth + end


def _values(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value
