"""The contract of ``optimizer``: a specification. Sharding builds the optimizer over the parameters as it has placed them, and steps it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from fw.registry import Plugin

if TYPE_CHECKING:
    from fw.kinds.offload import OffloadPolicy


@dataclass(frozen=True)
class OptimizerSpec:
    """``cls(groups, lr=lr, **arguments)``, where parameters named in the model's ``whole_undecayed()`` get weight decay 0.

    ``cls`` is a :class:`torch.optim.Optimizer`; its state holds tensors only: shaped like the parameter, independent of sharding, or, if it
    has a method ``begin`` that makes the state there is before the first step, DTensors of any shape and placement. What is read from a
    checkpoint passes through its method ``place(parameter, key, value)``, if it has one, which gives the tensor to keep. One that has an
    attribute ``grad_factor`` multiplies the gradients of its next step by that itself, which clips them; those of others are multiplied
    before.

    Attributes:
        state: of what it needs to see at once. ``elements``: the update of an element depends on no other, so that parameters may come cut
            and joined in any way. ``rows``: of a row (the last dimension); a rank's part of a parameter will do. ``whole``: of all of a
            parameter; where it is divided the update is collective, over DTensors.
        matrices: have what is at least two-dimensional in the model's blocks in a group of its own, in which ``matrix`` is True.
        note: what to know before a run with it, in a sentence; said once.
        in_backward: update each parameter as soon as its gradient is there, and free that.
    """

    cls: Callable[..., torch.optim.Optimizer]
    lr: float
    weight_decay: float = 0.0
    arguments: dict[str, Any] = field(default_factory=dict)
    state: Literal["elements", "rows", "whole"] = "elements"
    in_backward: bool = False
    matrices: bool = False
    note: str = ""


@dataclass
class OptimizerOptions:
    """What an optimizer of any kind has; options of plugins derive from it."""

    in_backward: bool = False
    """Update each parameter during backward, as soon as its gradient is there, and free the gradient: about one block's gradients exist
    at a time. Needs one micro-batch per step and gradient_clip_norm 0."""


class OptimizerPlugin(Plugin):
    """Decides the update rule."""

    kind: ClassVar[str] = "optimizer"

    def check(self, device_type: str, offload: OffloadPolicy) -> None:
        """Refuse what cannot be stepped, before any rank starts.

        Args:
            device_type: what the model computes on, ``cpu`` or ``cuda``, maybe on another host.

        Raises:
            UserError: with what would work.
        """

    @abstractmethod
    def spec(self, device: torch.device) -> OptimizerSpec:
        """The specification for parameters on ``device``; the same on every rank."""
