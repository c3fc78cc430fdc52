"""Which results to keep within a number of bytes, so that computing the others again costs least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fw_plugins.activation.profiling import BlockProfile, Operation

_OF_A_BLOCK, _OF_ALL = 256, 8192
"""Ways that are followed at most, of one block and of several together. Below them the choice is the best there is; above, ways that lie
close together are taken for one."""


class Choice(NamedTuple):
    """What a block keeps: the results named, or all that autograd saves where ``recomputes`` is False."""

    recomputes: bool
    keeps: frozenset[tuple[str, int]]


@dataclass(frozen=True)
class _Ways:
    """Ways to treat some blocks, of which none is better than another in both bytes and cost; by rising bytes.

    ``origin`` tells for each what it was made of.
    """

    bytes: NDArray[np.int64]
    cost: NDArray[np.float64]
    origin: NDArray[np.int64]


def least_bytes(blocks: Sequence[BlockProfile]) -> int:
    """What stays at least."""
    return sum(min(block.input_bytes, block.saved_bytes) for block in blocks)


def choose(blocks: Sequence[BlockProfile], budget_bytes: int) -> list[Choice]:
    """For each block what it keeps: Σ bytes ≤ ``budget_bytes``, Σ cost least. ``budget_bytes`` is at least :func:`least_bytes`.

    Blocks are independent, so the ways to treat each are reduced to those that are not worse than another in both respects, and these are
    joined block by block (multiple-choice knapsack; Nemhauser and Ullmann 1969, https://doi.org/10.1287/mnsc.15.9.494).
    """
    known: dict[BlockProfile, tuple[_Ways, list[Choice]]] = {}
    for block in blocks:
        if block not in known:
            known[block] = _of_block(block)
    joined = _Ways(np.zeros(1, np.int64), np.zeros(1), np.zeros(1, np.int64))
    trail: list[tuple[_Ways, int]] = []
    for block in blocks:
        ways, _ = known[block]
        width = len(ways.bytes)
        joined = _pruned(
            np.add.outer(joined.bytes, ways.bytes).ravel(),
            np.add.outer(joined.cost, ways.cost).ravel(),
            np.arange(len(joined.bytes) * width),
            budget_bytes,
            _OF_ALL,
        )
        trail.append((joined, width))
    found: list[Choice] = []
    at = len(joined.bytes) - 1
    for block, (ways, width) in zip(reversed(blocks), reversed(trail), strict=True):
        at, which = divmod(int(ways.origin[at]), width)
        found.append(known[block][1][which])
    return found[::-1]


def _of_block(block: BlockProfile) -> tuple[_Ways, list[Choice]]:
    worth: list[Operation] = [operation for operation in block.operations if operation.kept_bytes and operation.cost]
    ways = _Ways(np.array([block.input_bytes], np.int64), np.array([block.cost]), np.zeros(1, np.int64))
    kept: list[frozenset[tuple[str, int]]] = [frozenset()]
    for operation in worth:
        number = len(ways.bytes)
        ways = _pruned(
            np.concatenate([ways.bytes, ways.bytes + operation.kept_bytes]),
            np.concatenate([ways.cost, ways.cost - operation.cost]),
            np.arange(2 * number),
            block.saved_bytes,
            _OF_A_BLOCK,
        )
        kept = [kept[i] if i < number else kept[i - number] | {operation.key} for i in ways.origin.tolist()]
    choices = [Choice(True, keeps) for keeps in kept] + [Choice(False, frozenset())]
    ways = _pruned(
        np.append(ways.bytes, block.saved_bytes), np.append(ways.cost, 0.0), np.arange(len(choices)), block.saved_bytes, _OF_A_BLOCK
    )
    return ways, [choices[i] for i in ways.origin.tolist()]


def _pruned(size: NDArray[np.int64], cost: NDArray[np.float64], origin: NDArray[np.int64], most: int, limit: int) -> _Ways:
    fits = size <= most
    size, cost, origin = size[fits], cost[fits], origin[fits]
    order = np.lexsort((cost, size))
    size, cost, origin = size[order], cost[order], origin[order]
    before = np.concatenate([[np.inf], np.minimum.accumulate(cost)[:-1]])
    better = cost < before
    size, cost, origin = size[better], cost[better], origin[better]
    if len(size) > limit:
        # Evenly over the bytes, the first and the last among them.
        steps = np.linspace(size[0], size[-1], limit)
        chosen = np.unique(np.append(np.searchsorted(size, steps, side="right") - 1, len(size) - 1))
        size, cost, origin = size[chosen], cost[chosen], origin[chosen]
    return _Ways(size, cost, origin)
