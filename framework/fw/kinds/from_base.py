"""What adapters take from weights of their base."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class FromBase(Protocol):
    """How values of an added parameter come from a weight of the base."""

    @property
    def weight(self) -> str:
        """Its name."""

    def __call__(self, weight_OI: Tensor, seed: int) -> Tensor:
        """The values, divided as the weight is or whole; ``seed`` is the run's, 0 where there is none."""


@dataclass(frozen=True)
class NormsOf:
    """Of a weight ``[outputs, inputs]`` of the base, by its name: those of its rows, or with ``dim=0`` of its columns."""

    weight: str
    dim: int = 1

    def __call__(self, weight_OI: Tensor, seed: int = 0) -> Tensor:
        """``[outputs]`` or ``[inputs]``, in fp32."""
        return torch.linalg.vector_norm(weight_OI.detach().float(), dim=self.dim)
