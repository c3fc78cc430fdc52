"""The contract of ``precision``: dtypes as data, and layers that compute otherwise. Sharding owns the mechanism that applies dtypes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from fw.registry import Plugin

if TYPE_CHECKING:
    from fw.kinds.model import CausalLM
    from fw.kinds.sharding import StepSpec


@dataclass(frozen=True)
class LossScaling:
    """Dynamic loss scaling (Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740).

    The scale grows by 2 after ``growth_interval`` good steps and halves at a step whose gradient is not finite, which is skipped.
    """

    initial_scale: float = 65536.0
    growth_interval: int = 2000


@dataclass(frozen=True)
class PrecisionPolicy:
    """Attributes:
    parameters: dtype in which parameters and optimizer state are kept.
    compute: dtype of matrix products in forward and backward.
    reduce: dtype in which gradients are summed over ranks.
    loss_scaling: None where the exponent range needs none.
    accumulate: dtype in which the gradients of micro-batches are summed up, and kept until the step; None for that of the parameters.
    full_eval: whether validation and sampling run wholly in ``compute``, on weights converted once for all of it.
    """

    parameters: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    loss_scaling: LossScaling | None = None
    accumulate: torch.dtype | None = None
    full_eval: bool = False

    @property
    def accumulates_apart(self) -> bool:
        """Whether gradients are summed up in another dtype than the parameters have."""
        return self.accumulate not in (None, self.parameters)


@dataclass(frozen=True)
class Phase:
    """``policy`` holds from the step on before which ``from_step`` steps have been made."""

    from_step: int
    policy: PrecisionPolicy


class PrecisionPlugin(Plugin):
    """Decides the dtypes."""

    kind: ClassVar[str] = "precision"

    @abstractmethod
    def policy(self) -> PrecisionPolicy:
        """The dtypes, of the first phase where there are several; the same on every rank."""

    def phases(self) -> Sequence[Phase]:
        """In order of steps, the first one from 0. ``parameters``, ``reduce``, ``accumulate`` and ``loss_scaling`` are the same in all."""
        return (Phase(0, self.policy()),)

    def policy_at(self, step: int) -> PrecisionPolicy:
        """The dtypes of the step before which ``step`` steps have been made: a function of that number alone."""
        return [phase.policy for phase in self.phases() if phase.from_step <= step][-1]

    def check(self, model: CausalLM, mesh_shape: Mapping[str, int], spec: StepSpec, sequence_length: int) -> None:
        """Refuse what the model or the device does not allow, before any rank starts. ``model`` is on the meta device.

        Raises:
            UserError: with what would work.
        """

    def convert(self, model: CausalLM, device: torch.device) -> None:
        """Have modules compute otherwise; their names and parameters stay, and they stay the same objects, since what divides layers has
        hooks on them. On the meta device, on every rank alike, once layers are divided and before activations and compilation.

        Args:
            device: what the model will compute on.

        Raises:
            UserError: the device does not do what was asked for.
        """
