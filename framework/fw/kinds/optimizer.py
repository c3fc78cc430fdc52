"""The contract of ``optimizer``: a specification. Sharding builds the optimizer over the parameters as it has placed them, and steps it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from fw.registry import Plugin


@dataclass(frozen=True)
class OptimizerSpec:
    """``cls(groups, lr=lr, **arguments)``, where parameters named in the model's ``undecayed()`` get weight decay 0.

    ``cls`` is a :class:`torch.optim.Optimizer`; its state holds tensors only, shaped like the parameter or independent of sharding.
    """

    cls: Callable[..., torch.optim.Optimizer]
    lr: float
    weight_decay: float = 0.0
    arguments: dict[str, Any] = field(default_factory=dict)


class OptimizerPlugin(Plugin):
    """Decides the update rule."""

    kind: ClassVar[str] = "optimizer"

    @abstractmethod
    def spec(self, device: torch.device) -> OptimizerSpec:
        """The specification for parameters on ``device``; the same on every rank."""
