"""What looks like a mistake in how a run uses memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fw.config import format_size

GROWING, KEPT, TWICE = "growing", "kept", "twice"


@dataclass(frozen=True)
class Finding:
    """Something that takes memory to no purpose, or that nobody will give back.

    Attributes:
        kind: ``growing``: more after each step; ``kept``: made in a step and there at its end; ``twice``: equal bytes, not shared.
        nbytes: a step, at the end of a step, or more than once would take.
        count: of tensors.
        where: the site, or the names of tensors that are equal.
        lines: of the Python program that made them, those with most bytes first.
        holders: who has them now.
        ranks: on which it was found.
    """

    kind: str
    nbytes: int
    count: int
    where: str
    lines: Sequence[str] = ()
    holders: Sequence[str] = ()
    ranks: Sequence[int] = (0,)

    def sentence(self, world_size: int) -> str:
        """In words, for a line of its own."""
        size, number = format_size(self.nbytes), f"{self.count} tensor{'s' * (self.count != 1)}"
        if self.kind == TWICE:
            said = f"equal bytes {self.count} times, {size} more than once would take: {self.where}"
        else:
            grows = f"grows by {size} ({number}) a step" if self.kind == GROWING else f"{size} ({number}) made in a step outlast it"
            said = f"{grows}: {self.where}"
            said += f" at {'; '.join(self.lines)}" if self.lines else ""
            said += f"; held by {'; '.join(self.holders)}" if self.holders else ""
        if world_size == 1:
            return said
        return f"{said} ({'every rank' if len(self.ranks) == world_size else 'rank ' + ', '.join(map(str, self.ranks))})"

    def as_json(self) -> dict[str, Any]:
        """Its attributes."""
        return asdict(self)

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Finding:
        """What :meth:`as_json` gave."""
        return Finding(**raw)


def over_ranks(by_rank: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Those of all ranks, each once, with the ranks that have it; the largest first of each kind."""
    ranks: dict[tuple[Any, ...], list[int]] = {}
    first: dict[tuple[Any, ...], Finding] = {}
    for rank, found in enumerate(by_rank):
        for finding in found:
            key = (finding.kind, finding.nbytes, finding.count, finding.where, tuple(finding.lines))
            first.setdefault(key, finding)
            ranks.setdefault(key, []).append(rank)
    order = (GROWING, KEPT, TWICE)
    merged = [Finding(**{**finding.as_json(), "ranks": ranks[key]}) for key, finding in first.items()]
    return sorted(merged, key=lambda finding: (order.index(finding.kind), -finding.nbytes))
