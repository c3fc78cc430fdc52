"""What of a model's blocks can be left out, or rescaled without changing what it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Width:
    """Something that every block has the same number of, and can have less of.

    Attributes:
        number: that there are.
        fields: of ``config.json`` that count it, and how many one is.
        seen_by: the linear layer of a block that sees what they compute, by its name there; as many inputs in a row are of one.
        cut: parameters of a block, the dimension along which they lie, and how many slices in a row are of one.
    """

    number: int
    fields: Mapping[str, int]
    seen_by: str
    cut: Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Rescaling:
    """Inputs of layers that can be divided by numbers, one for each, while the layers' weights are multiplied.

    Attributes:
        layers: linear layers of a block, all that see these inputs, by their names there.
        makers: parameters of the block whose entries, or rows, make one input each, and what is added to them where they multiply.
    """

    layers: tuple[str, ...]
    makers: Mapping[str, float]
