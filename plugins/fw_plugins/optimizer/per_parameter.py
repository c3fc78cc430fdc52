"""What fw's own optimizers share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fw.api import update_alone

_CHUNK = 1 << 24
"""Elements of a parameter that are updated at a time, where it is done with temporary copies."""


class PerParameter(torch.optim.Optimizer):
    """An update of one parameter after another, so that what is temporary is never more than for one.

    Plans take one for others that are alike (:func:`fw.api.update_alone`): what an update needs of memory may depend on the parameter,
    its gradient, its state and its group alone.
    """

    def begin(self) -> None:
        """Make the state of every parameter that has none yet, as it is before the first step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.state[parameter].update(self.first_state(parameter, group))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = evaluated(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if not self.state[parameter]:
                        self.state[parameter].update(self.first_state(parameter, group))
                    update_alone(self.update, parameter, parameter.grad, self.state[parameter], group)
        return loss

    @abstractmethod
    def first_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state before the first step, by key; what is divided over ranks as a DTensor."""

    @abstractmethod
    def update(self, parameter: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """Change a parameter and its state in place."""


def evaluated(closure: Callable[[], float] | None) -> float | None:
    """What a step's closure gives, where there is one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def local(tensor: Tensor) -> Tensor:
    """What this rank has of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rows(tensor: Tensor) -> Tensor:
    """A view ``[R, C]`` of what this rank has, C being the last dimension."""
    kept = local(tensor)
    return kept.view(-1, kept.shape[-1] if kept.dim() else 1)


def chunks(shape: torch.Size) -> Iterator[slice]:
    """Rows of ``[R, C]``, some at a time."""
    count = max(1, _CHUNK // max(1, shape[1]))
    for start in range(0, shape[0], count):
        yield slice(start, start + count)
