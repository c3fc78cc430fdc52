"""What all forms of grouped integers in files have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import Tensor

from fw_plugins.quantization.coded import CodedWeight
from fw_plugins.quantization.grouped import Grouped


@dataclass(frozen=True)
class Scheme:
    """What a ``quantization_config`` says of weights; ``group_size`` -1 for whole rows."""

    bits: int
    group_size: int
    symmetric: bool


class GroupedFiles(ABC):
    """How the files of a directory hold weights."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme

    @abstractmethod
    def stored(self, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Weights, and the names of all their tensors, codes first."""

    @abstractmethod
    def open(self, name: str, read: Callable[[str], Tensor]) -> CodedWeight:
        """One of them. What it is made of is read when it is asked for.

        Raises:
            UserError: its tensors do not fit one another.
        """

    def layout(self, name: str, read: Callable[[str], Tensor]) -> Grouped | None:
        """Of one of them; None where the scheme says it of all."""
        return None
