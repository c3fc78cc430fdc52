"""Sets of moments, as intervals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

Interval = tuple[int, int]
"""From when to when, in nanoseconds."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments, in order and without overlap."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def without(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """What of ``intervals`` is not in ``others``; both in order and without overlap."""
    return list(_without(intervals, others))


def _without(intervals: Sequence[Interval], others: Sequence[Interval]) -> Iterator[Interval]:
    first = 0
    for begin, end in intervals:
        while first < len(others) and others[first][1] <= begin:
            first += 1
        place = first
        while place < len(others) and others[place][0] < end:
            if others[place][0] > begin:
                yield begin, others[place][0]
            begin = max(begin, others[place][1])
            place += 1
        if begin < end:
            yield begin, end


def length(intervals: Iterable[Interval]) -> int:
    """In all."""
    return sum(end - begin for begin, end in intervals)
