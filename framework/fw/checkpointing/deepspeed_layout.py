"""Where DeepSpeed keeps a parameter: ranges of the flat partitions of each rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fw.errors import UserError


@dataclass(frozen=True)
class Span:
    """Elements ``start`` up to ``end`` of flat ``group`` of ``rank``."""

    rank: int
    group: int
    start: int
    end: int


@dataclass(frozen=True)
class Placed:
    """A parameter: its shape, and its spans in the order of its elements; the last may end in padding."""

    shape: tuple[int, ...]
    spans: tuple[Span, ...]

    def gather(self, flats: Sequence[Sequence[Tensor]]) -> Tensor:
        """The whole parameter, in fp32, from flats by rank and group; the only copy that is made."""
        whole = torch.empty(self.shape, dtype=torch.float32)
        flat, filled = whole.reshape(-1), 0
        for span in self.spans:
            count = min(span.end - span.start, flat.numel() - filled)
            flat[filled : filled + count] = flats[span.rank][span.group].reshape(-1)[span.start : span.start + count]
            filled += count
        return whole


def by_elements(
    shapes: Sequence[Mapping[str, Sequence[int]]], sizes: Sequence[int], ranks: int, gaps: Sequence[Sequence[int]] | None
) -> dict[str, Placed]:
    """Stages 1 and 2: a group's parameters end to end, cut into equal parts.

    Args:
        shapes: of the parameters of each group, in order.
        sizes: of a rank's part of each group, in elements, padding included.
        gaps: elements of padding after each parameter; none where None.

    Raises:
        UserError: parameters are larger than the parts.
    """
    found: dict[str, Placed] = {}
    for group, (named, size) in enumerate(zip(shapes, sizes, strict=True)):
        offset = 0
        for position, (name, shape) in enumerate(named.items()):
            end = offset + math.prod(shape)
            if end > size * ranks:
                raise UserError(f"{name} ends at element {end:,} of a group of {size * ranks:,}: parameter shapes and partitions differ")
            spans = [
                Span(rank, group, max(offset - rank * size, 0), min(end - rank * size, size))
                for rank in range(ranks)
                if offset < (rank + 1) * size and end > rank * size
            ]
            found[name] = Placed(tuple(shape), tuple(spans))
            offset = end + (gaps[group][position] if gaps is not None else 0)
    return found


def by_parameter(shapes: Sequence[Mapping[str, Sequence[int]]], sizes: Sequence[int], ranks: int) -> dict[str, Placed]:
    """Stage 3: each parameter is cut by itself; a rank's parts lie end to end across its flats.

    Raises:
        UserError: the flats hold more or less than the parameters.
    """
    found: dict[str, Placed] = {}
    starts = [sum(sizes[:group]) for group in range(len(sizes))]
    offset = 0
    for name, shape in ((n, s) for named in shapes for n, s in named.items()):
        end = offset + math.ceil(math.prod(shape) / ranks)
        spans = [
            Span(rank, group, max(offset - start, 0), min(end - start, size))
            for rank in range(ranks)
            for group, (start, size) in enumerate(zip(starts, sizes, strict=True))
            if offset < start + size and end > start
        ]
        found[name] = Placed(tuple(shape), tuple(spans))
        offset = end
    if offset != sum(sizes):
        raise UserError(f"parameters come to {offset:,} elements a rank and the partitions to {sum(sizes):,}")
    return found


def states_of(base: Any, groups: int) -> list[dict[str, Any]]:
    """A rank's optimizer state by group; ``base`` is an optimizer's ``state_dict()``, or a list of states."""
    if isinstance(base, list):
        return [dict(state) for state in base]
    states = [dict(base.get("state", {}).get(group, {})) for group in range(groups)]
    steps = [group["step"] for group in base.get("param_groups", []) if "step" in group]
    for state in states:
        if state and "step" not in state and steps:
            state["step"] = steps[0]
    return states
