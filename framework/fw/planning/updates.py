"""Parameters that are alike are updated alike: what the first one's update does with memory, the others' do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from fw.meter.account import Block, History, Site
from fw.planned import Update


class _Done(NamedTuple):
    """What an update did, from which change of a history on: ``changes``, and costs by the number of changes before each."""

    changes: list[tuple[Block, int]]
    costs: list[tuple[int, Any]]


class Updates:
    """Of one step.

    Args:
        history: of the step.
        site: where in it what is made now is made.
        told: what is to be alike of a tensor besides its shape, strides and dtype.
    """

    def __init__(self, history: History, site: Callable[[], Site], told: Callable[[Tensor], tuple[Any, ...]]) -> None:
        self._history, self._site, self._told = history, site, told
        self._done: dict[Any, _Done | None] = {}
        """By what is alike; None where an update keeps memory, or gives back what it did not take: these are all done."""

    def stand_in(self, update: Update, parameter: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> bool:
        """Record what an update does, which is done once; False where it has to be done."""
        if (key := self._key(update, parameter, grad, state, group)) is None:
            return False
        if key not in self._done:
            changes, costs = len(self._history.changes), len(self._history.costs)
            update(parameter, grad, state, group)
            self._done[key] = _done(self._history, changes, costs)
            return True
        if (done := self._done[key]) is None:
            return False
        start, site = len(self._history.changes), self._site()
        copies = {block: replace(block, site=site) for block, _ in done.changes}
        self._history.changes += [(copies[block], sign) for block, sign in done.changes]
        self._history.costs += [(start + index, cost) for index, cost in done.costs]
        return True

    def _key(self, update: Update, parameter: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> Any:
        """What is the same of updates that are alike; None where not all of it can be known."""
        numbers = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
        if not all(isinstance(value, int | float | str | None) for value in numbers.values()):
            return None
        tensors = {"": parameter, ".grad": grad, **{name: value for name, value in state.items() if name not in numbers}}
        return (
            type(getattr(update, "__self__", None)),
            getattr(update, "__func__", update),
            tuple((name, *self._of(tensor)) for name, tensor in sorted(tensors.items())),
            tuple(sorted((name, repr(value)) for name, value in numbers.items())),
            tuple((name, repr(value)) for name, value in sorted(group.items()) if name != "params"),
        )

    def _of(self, tensor: Tensor) -> tuple[Any, ...]:
        """What is alike of tensors that are."""
        divided: tuple[Any, ...] = ()
        if isinstance(tensor, DTensor):
            divided = tensor.shape, tensor.device_mesh, tensor.placements
            tensor = tensor._local_tensor
        return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device, divided, *self._told(tensor)


def _done(history: History, changes: int, costs: int) -> _Done | None:
    """From there on; None where it did not give back just what it took."""
    own = history.changes[changes:]
    there: set[Block] = set()
    for block, sign in own:
        if sign > 0:
            there.add(block)
        elif block in there:
            there.remove(block)
        else:
            return None
    return None if there else _Done(own, [(index - changes, cost) for index, cost in history.costs[costs:]])
