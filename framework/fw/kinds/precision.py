"""The contract of ``precision``: dtypes as data. Sharding owns the mechanism that applies them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from fw.registry import Plugin


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
    """

    parameters: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    loss_scaling: LossScaling | None = None
    accumulate: torch.dtype | None = None

    @property
    def accumulates_apart(self) -> bool:
        """Whether gradients are summed up in another dtype than the parameters have."""
        return self.accumulate not in (None, self.parameters)


class PrecisionPlugin(Plugin):
    """Decides the dtypes."""

    kind: ClassVar[str] = "precision"

    @abstractmethod
    def policy(self) -> PrecisionPolicy:
        """The dtypes; the same on every rank."""
