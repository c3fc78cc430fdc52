"""How the samples of a step divide into micro-batches of replicas: a pure function of their lengths, so that no rank has to ask another.

Every replica gets equally many, since ranks meet in collectives in each; where samples are too few, some are empty.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Group = NDArray[np.int64]
"""Positions, among the samples that are divided, of those in a micro-batch."""


@dataclass(frozen=True)
class Limit:
    """What a micro-batch holds at most: ``rows`` sequences, or ``tokens``, which are sequences × the longest. One of them is given."""

    rows: int | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class Padding:
    """Rows are padded to a multiple of ``multiple``, and to no more than ``most``."""

    multiple: int
    most: int

    def padded(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Lengths with padding, elementwise."""
        return np.minimum(-(-lengths // self.multiple) * self.multiple, self.most)


def divide(lengths: NDArray[np.int64], limit: Limit, replicas: int) -> list[list[Group]]:
    """For each replica its micro-batches.

    Samples of similar length come together, and the number of micro-batches is a multiple of ``replicas``: as few as the limit allows, but
    that a token limit lets them be more and smaller where replicas would otherwise have nothing to do. Those that run at the same time on
    all replicas cost about the same, the largest first, on the first replica.

    Args:
        lengths: with padding.
    """
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order]
    bounds = _by_rows(len(order), limit.rows) if limit.rows is not None else _by_tokens(descending, limit.tokens or 0, replicas)
    costs = [int(descending[a]) * (b - a) for a, b in zip(bounds, bounds[1:], strict=False)]
    groups = [order[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    slots = -(-len(groups) // replicas)
    groups += [order[:0]] * (slots * replicas - len(groups))
    if len(set(costs)) <= 1:  # samples stay in their order
        return [groups[replica * slots : (replica + 1) * slots] for replica in range(replicas)]
    costs += [0] * (len(groups) - len(costs))
    by_cost = sorted(range(len(groups)), key=lambda number: -costs[number])
    dealt: list[list[Group]] = [[] for _ in range(replicas)]
    for slot in range(slots):
        there = by_cost[slot * replicas : (slot + 1) * replicas]
        for replica, number in enumerate(there if slot % 2 == 0 else there[::-1]):  # who had the most gets the least next
            dealt[replica].append(groups[number])
    return dealt


def _by_rows(samples: int, rows: int) -> list[int]:
    return [*range(0, samples, rows), samples]


def _by_tokens(descending: NDArray[np.int64], tokens: int, replicas: int) -> list[int]:
    """Bounds of the groups, from the longest sample on."""
    if not len(descending):
        return [0]
    fewest = len(_greedy(descending, tokens)) - 1
    groups = min(-(-fewest // replicas) * replicas, len(descending))
    least, most = int(descending[0]), tokens
    while least < most:  # the smallest limit with which they are not too many: groups of like cost
        middle = (least + most) // 2
        if len(_greedy(descending, middle)) - 1 <= groups:
            most = middle
        else:
            least = middle + 1
    bounds = _greedy(descending, most)
    largest = [(-int(descending[a]) * (b - a), a, b) for a, b in zip(bounds, bounds[1:], strict=False) if b - a > 1]
    heapq.heapify(largest)
    for _ in range(groups - (len(bounds) - 1)):
        _, a, b = heapq.heappop(largest)
        middle = (a + b + 1) // 2
        bounds.append(middle)
        for half in ((a, middle), (middle, b)):
            if half[1] - half[0] > 1:
                heapq.heappush(largest, (-int(descending[half[0]]) * (half[1] - half[0]), *half))
    return sorted(bounds)


def _greedy(descending: NDArray[np.int64], tokens: int) -> list[int]:
    """As many samples in each group as the tokens allow: no other cut of a sorted list has fewer."""
    bounds = [0]
    while bounds[-1] < len(descending):
        bounds.append(min(bounds[-1] + tokens // int(descending[bounds[-1]]), len(descending)))
    return bounds
