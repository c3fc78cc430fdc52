"""Few rows in which every pair is: a covering array of strength two, with pairs that cannot be (Cohen et al. 1997, the AETG system)."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations

Level = tuple[str, str]
Pair = frozenset[Level]

_TRIES = 12


class NoRow(ValueError):
    """``levels`` are in no row, since everything that could stand beside them is forbidden."""

    def __init__(self, levels: Sequence[Level]) -> None:
        super().__init__(f"there is no row with {sorted(levels)}")
        self.levels = frozenset(levels)


def pairs_of(row: Mapping[str, str]) -> Iterator[Pair]:
    """That are in a row."""
    return (frozenset(pair) for pair in combinations(row.items(), 2))


def all_pairs(parts: Mapping[str, Collection[str]]) -> set[Pair]:
    """That there are."""
    each = {part: [(part, name) for name in names] for part, names in parts.items()}
    return {frozenset((a, b)) for one, other in combinations(each, 2) for a in each[one] for b in each[other]}


def cover(
    parts: Mapping[str, Collection[str]],
    impossible: Collection[frozenset[Level]],
    first: Sequence[Sequence[Level]] = (),
    wanted: Collection[Pair] | None = None,
    seed: int = 0,
) -> list[dict[str, str]]:
    """Rows of one name from each part, in which all pairs are that can be.

    Args:
        impossible: sets of names of which no row has all: pairs, and larger ones.
        first: what some rows are to have together, whatever else they have.
        wanted: pairs; all that are not impossible where left out.

    Raises:
        NoRow: a pair that nothing forbids fits into no row, or something of ``first`` does not.
    """
    chance = random.Random(seed)
    blocked: dict[Level, list[frozenset[Level]]] = {}
    for some in impossible:
        for level in some:
            blocked.setdefault(level, []).append(some - {level})

    def fits(level: Level, row: Mapping[str, str]) -> bool:
        return not any(all(row.get(part) == name for part, name in others) for others in blocked.get(level, ()))

    def filled(begin: Sequence[Level]) -> dict[str, str] | None:
        row: dict[str, str] = {}
        for part, name in begin:
            if not fits((part, name), row):
                return None
            row[part] = name
        rest = [part for part in parts if part not in row]
        chance.shuffle(rest)
        for part in rest:
            possible = [name for name in parts[part] if fits((part, name), row)]
            if not possible:
                return None
            gains = {name: sum(frozenset(((part, name), level)) in todo for level in row.items()) for name in possible}
            most = max(gains.values())
            row[part] = chance.choice([name for name in possible if gains[name] == most])
        return row

    todo = {pair for pair in (all_pairs(parts) if wanted is None else wanted) if pair not in set(impossible)}
    rows: list[dict[str, str]] = []
    begins = [list(one) for one in first]
    while todo or begins:
        if begins:
            seeds = [begins.pop()] * _TRIES
        else:
            ordered = sorted(map(sorted, todo))
            seeds = [chance.choice(ordered) for _ in range(_TRIES)]
        found = [row for begin in seeds if (row := filled(begin)) is not None]
        if not found:
            found = [row for _ in range(50) if (row := filled(seeds[0])) is not None]
        if not found:
            raise NoRow(seeds[0])
        best = max(found, key=lambda row: sum(pair in todo for pair in pairs_of(row)))
        todo -= set(pairs_of(best))
        rows.append({part: best[part] for part in parts})
    return rows
