"""What fw's own optimizers share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class PerParameter(torch.optim.Optimizer):
    """An update of one parameter after another, so that what is temporary is never more than for one."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, group)
        return loss

    @abstractmethod
    def update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Change a parameter and its state in place."""
