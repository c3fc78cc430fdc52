"""The contract of ``optimizer``: a specification. Sharding builds the optimizer over the parameters as it has placed them, and steps it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch

from fw.registry import Plugin


@dataclass(frozen=True)
class OptimizerSpec:
    """``cls(groups, lr=lr, **arguments)``, where parameters named in the model's ``undecayed()`` get weight decay 0.

    ``cls`` is a :class:`torch.optim.Optimizer`; its state holds tensors only: shaped like the parameter, independent of sharding, or, if it
    has a method ``begin`` that makes the state there is before the first step, DTensors of any shape and placement.

    Attributes:
        state: of what it needs to see at once. ``elements``: the update of an element depends on no other, so that parameters may come cut
            and joined in any way. ``rows``: of a row (the last dimension); a rank's part of a parameter will do. ``whole``: of all of a
            parameter; where it is divided the update is collective, over DTensors.
        matrices: have what is at least two-dimensional in the model's blocks in a group of its own, in which ``matrix`` is True.
        in_backward: update each parameter as soon as its gradient is there, and free that.
    """

    cls: Callable[..., torch.optim.Optimizer]
    lr: float
    weight_decay: float = 0.0
    arguments: dict[str, Any] = field(default_factory=dict)
    state: Literal["elements", "rows", "whole"] = "elements"
    in_backward: bool = False
    matrices: bool = False


@dataclass
class OptimizerOptions:
    """What an optimizer of any kind has; options of plugins derive from it."""

    in_backward: bool = False
    """Update each parameter during backward, as soon as its gradient is there, and free the gradient: about one block's gradients exist
    at a time. Needs one micro-batch per step and gradient_clip_norm 0."""


class OptimizerPlugin(Plugin):
    """Decides the update rule."""

    kind: ClassVar[str] = "optimizer"

    @abstractmethod
    def spec(self, device: torch.device) -> OptimizerSpec:
        """The specification for parameters on ``device``; the same on every rank."""
