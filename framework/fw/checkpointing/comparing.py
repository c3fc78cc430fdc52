"""How two checkpoints differ, tensor by tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fw.checkpointing.rewriting import groups_of
from fw.checkpointing.state import STATE
from fw.checkpointing.stream import size_bytes
from fw.checkpointing.tensor_files import TensorFiles
from fw.errors import UserError
from fw.place import Place

_ROWS_BYTES = 1 << 26


@dataclass
class Difference:
    """Of two checkpoints.

    Attributes:
        identical: tensors that are the same bit for bit.
        only: names that one of them has, by group and side.
        changed: for each tensor that differs, what of it: shapes and dtypes, or the largest and the mean absolute difference and the
            relative one, ‖a − b‖ / ‖a‖.
        state: keys of the trainer's state that differ, with both values.
    """

    identical: int = 0
    only: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    changed: dict[str, dict[str, Any]] = field(default_factory=dict)
    state: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether they hold the same."""
        return not (self.only or self.changed or self.state)


def compare(one: Place, other: Place, progress: Callable[[int], object] = lambda count: None) -> Difference:
    """Compare tensors and state of two steps or model directories, some rows in memory at a time.

    Args:
        progress: hears of bytes of the first one that were compared.

    Raises:
        UserError: one of them holds no tensors.
    """
    found = Difference()
    groups, others = groups_of(one), groups_of(other)
    if not groups or not others:
        raise UserError(f"{other if groups else one} holds no tensors of a model")
    for group in sorted({*groups, *others}):
        mine, theirs = groups.get(group), others.get(group)
        names, other_names = set(mine.where if mine else ()), set(theirs.where if theirs else ())
        if only := {side: sorted(left) for side, left in (("first", names - other_names), ("second", other_names - names)) if left}:
            found.only[group] = only
        if mine is None or theirs is None:
            continue
        for name in sorted(names & other_names):
            difference = _compare(mine, theirs, name, progress)
            if difference is None:
                found.identical += 1
            else:
                found.changed[f"{group}: {name}"] = difference
    found.state = _states(one, other)
    return found


def _compare(mine: TensorFiles, theirs: TensorFiles, name: str, progress: Callable[[int], object]) -> dict[str, Any] | None:
    shapes = mine.shape(name), theirs.shape(name)
    dtypes = mine.dtype(name), theirs.dtype(name)
    if shapes[0] != shapes[1]:
        return {"shapes": [list(shape) for shape in shapes]}
    largest = total = squares = reference = 0.0
    same = dtypes[0] == dtypes[1]
    for a, b in _rows(mine, theirs, name):
        progress(size_bytes(a))
        if same and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
            reference += float(a.double().square().sum())
            continue
        same = False
        gap = (a.double() - b.double()).abs()
        here = float(gap.max()) if gap.numel() else 0.0
        largest = here if here > largest or math.isnan(here) else largest
        total += float(gap.sum())
        squares += float(gap.square().sum())
        reference += float(a.double().square().sum())
    if same:
        return None
    count = max(1, math.prod(shapes[0]))
    found: dict[str, Any] = {
        "largest": largest,
        "mean": total / count,
        "relative": math.sqrt(squares / reference) if reference else math.inf,  # no number where one of them holds such
    }
    if dtypes[0] != dtypes[1]:
        found["dtypes"] = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    return found


def _rows(mine: TensorFiles, theirs: TensorFiles, name: str) -> Iterator[tuple[Tensor, Tensor]]:
    shape = mine.shape(name)
    if not shape:
        yield mine.whole(name), theirs.whole(name)
        return
    slices = mine.where[name].get_slice(name), theirs.where[name].get_slice(name)
    step = max(1, _ROWS_BYTES // max(1, math.prod(shape[1:]) * 8))
    for start in range(0, shape[0], step):
        rows = (slice(start, min(start + step, shape[0])),)
        yield slices[0][rows], slices[1][rows]


def _states(one: Place, other: Place) -> dict[str, list[Any]]:
    states = [json.loads(step.read(STATE)) if step.has(STATE) else {} for step in (one, other)]
    keys = sorted({*states[0], *states[1]})
    return {key: [state.get(key) for state in states] for key in keys if states[0].get(key) != states[1].get(key)}
