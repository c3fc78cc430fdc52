"""Linear layers whose weights are codes of 4 or 8 bits with scales by groups, by a kernel that computes with the codes themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fw.kernels.linear import PANEL, PackedLinear, layer_of
from fw.kernels.room import Room
from fw.planned import on_gpu


@dataclass(frozen=True)
class GroupedCodes:
    """A weight ``[O, I]``: ``scale · number(code) + offset``, with a scale and an offset for each output and group of neighbouring inputs.

    Attributes:
        codes: uint8 ``[O, I/2]``, of 4 bits, the first of two neighbours in the low ones; or int8 ``[O, I]``, numbers themselves.
        numbers: that the 16 codes of 4 bits stand for, as bfloat16 holds them; None of 8 bits.
        scale_OG: fp32; so is ``offset_OG``, None for none.
    """

    codes: Tensor
    numbers: Tensor | None
    scale_OG: Tensor
    offset_OG: Tensor | None


class GroupedLinear(PackedLinear):
    """``x Wᵀ + b`` in bfloat16 of a weight in groups, products of codes added up in fp32: more exact than with weights rounded to bfloat16.

    Args:
        codes: of the weight; ``layer`` gives features and bias.
    """

    numbers: Tensor | None
    offset: Tensor | None

    def __init__(self, layer: nn.Linear, codes: GroupedCodes, room: Room | None = None) -> None:
        outputs, inputs = layer.out_features, layer.in_features
        self._codes: GroupedCodes | None = codes
        self._group = inputs // codes.scale_OG.shape[1]
        self._four_bits = codes.numbers is not None
        shape = layer_of(torch.empty(outputs, inputs, device="meta"))
        shape.bias = layer.bias
        super().__init__(shape, room or Room(codes.codes.nbytes))
        self._codes = None

    @staticmethod
    def takes(codes: GroupedCodes) -> bool:
        """Whether the kernel does: groups of an even number of inputs, on the CPU."""
        inputs = codes.codes.shape[1] * (1 if codes.numbers is None else 2)
        groups = codes.scale_OG.shape[1]
        here = codes.codes.is_cpu and not on_gpu(codes.codes)
        return here and not inputs % groups and not inputs // groups % 2

    @property
    def kind(self) -> int:  # type: ignore[override]
        """Of the kernel's."""
        return 4 if self._four_bits else 5

    def _kept(self, weight_OI: Tensor, room: Room) -> dict[str, Tensor]:
        codes = self._codes
        assert codes is not None
        together = 1 if self._four_bits else 2
        kept = {"packed": _in_panels(codes.codes, room, together), "scale": _in_panels(codes.scale_OG, room)}
        if codes.offset_OG is not None:
            kept["offset"] = _in_panels(codes.offset_OG, room)
        if codes.numbers is not None:
            kept["numbers"] = codes.numbers.to(torch.bfloat16)
        return kept

    def describe(self, layer: Any) -> None:
        """Its groups."""
        layer.group = self._group
        layer.offset, layer.table = (None if (x := getattr(self, name, None)) is None else x.data_ptr() for name in ("offset", "numbers"))


def _in_panels(x_OC: Tensor, room: Room, together: int = 1) -> Tensor:
    """``[⌈O/32⌉, C/g, 32, g]`` with g neighbours ``together``, filled up with zeros."""
    padded_OC = F.pad(x_OC, (0, 0, 0, -len(x_OC) % PANEL))
    panels = padded_OC.view(-1, PANEL, padded_OC.shape[1] // together, together).transpose(1, 2)
    return room.empty(panels.shape, panels.dtype).copy_(panels)
