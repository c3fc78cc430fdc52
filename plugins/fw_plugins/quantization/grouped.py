"""Weights as integers of 4 or 8 bits, ``W ≈ scale · (code - zero)``, with a scale for each group of a row's neighbours.

Products are of the dtype that activations have: what inference engines call W4A16 and W8A16. Symmetric codes are round(w / scale) with
scale = max |w| / (2ᵇ⁻¹ - ½); asymmetric ones spread over [min, max], 0 included, and keep the code of zero, too. Rounding to the nearest is
done here; codes chosen by what a layer sees come from elsewhere, in the same layout.

Shape suffixes: O features out, I features in, G groups of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fw.api.kernels import GroupedCodes

SCALE, ZERO, ORDER = "weight_scale", "weight_zero_point", "weight_g_idx"
_AT_ONCE = 1 << 24
"""Weights that are in fp32 while they are made of codes."""


@dataclass(frozen=True)
class Grid:
    """Where the codes of some weights lie.

    Attributes:
        scale: of each group ``[O, G]``, fp32.
        zero: what zero is coded as, a whole number, fp32.
        most: the largest code; the smallest is 0.
    """

    scale: Tensor
    zero: Tensor
    most: int

    def of(self, group: int) -> Grid:
        """Of one group ``[O]``."""
        return Grid(self.scale[:, group], self.zero[:, group], self.most)

    def whole(self) -> Grid:
        """For weights ``[O, G, n]``."""
        return Grid(self.scale[..., None], self.zero[..., None], self.most)

    def codes(self, weight: Tensor) -> Tensor:
        """The nearest of each weight, fp32."""
        middle = (self.most + 1) // 2  # rounded about zero, as what is added takes bits of what is behind the point
        return (weight / self.scale + (self.zero - middle)).round_().add_(middle).clamp_(0, self.most)

    def values(self, codes: Tensor) -> Tensor:
        """What codes stand for, fp32."""
        return (codes - self.zero) * self.scale


@dataclass(frozen=True)
class Grouped:
    """How a weight ``[O, I]`` is kept.

    Attributes:
        features: O and I.
        bits: of a code, 4 or 8.
        group: neighbours in a row that share a scale, a divisor of I.
        symmetric: zero is the middle of the codes, and is not kept.
        ordered: which group each column belongs to is kept, too: those of a group need not be neighbours. Codes that are made here have
            neighbours for groups all the same.
    """

    features: tuple[int, int]
    bits: int
    group: int
    symmetric: bool
    ordered: bool = False

    @property
    def groups(self) -> int:
        """Of a row."""
        return self.features[1] // self.group

    def kept(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Codes by 8 / bits in a byte, the first in the low bits, rows filled up to whole 32-bit words; scales as the bits of fp32."""
        out, into = self.features
        found = {"weight": ((out, -(-into * self.bits // 32) * 4), torch.uint8), SCALE: ((out, self.groups), torch.int32)}
        if not self.symmetric:
            found[ZERO] = ((out, self.groups), torch.uint8)
        return {**found, ORDER: ((into,), torch.int32)} if self.ordered else found

    def grid(self, weight_OI: Tensor, dtype: torch.dtype) -> Grid:
        """What the smallest and the largest weight of each group ask for.

        Args:
            dtype: that scales are rounded to, since files hold them so.
        """
        weight_OGn = weight_OI.float().unflatten(1, (self.groups, self.group))
        most = 2**self.bits - 1
        if self.symmetric:
            scale_OG = weight_OGn.abs().amax(-1) / weight_OGn.new_full((), most / 2)  # a GPU multiplies by the inverse of a Python number
            zero_OG = torch.full_like(scale_OG, 2 ** (self.bits - 1))
        else:
            low_OG, high_OG = weight_OGn.amin(-1).clamp(max=0), weight_OGn.amax(-1).clamp(min=0)
            scale_OG = (high_OG - low_OG) / weight_OGn.new_full((), most)
            zero_OG = low_OG
        scale_OG = scale_OG.to(dtype).float()
        scale_OG = torch.where(scale_OG > 0, scale_OG, torch.ones_like(scale_OG))  # of a group that is all zero
        if not self.symmetric:
            zero_OG = (-zero_OG / scale_OG).round_().clamp_(0, most)
        return Grid(scale_OG, zero_OG, most)

    def quantize(self, weight_OI: Tensor) -> dict[str, Tensor]:
        """By rounding to the nearest."""
        grid = self.grid(weight_OI, weight_OI.dtype)
        return self.keep(grid.whole().codes(weight_OI.float().unflatten(1, (self.groups, self.group))).flatten(1), grid)

    def rounded(self, weight_OI: Tensor) -> Tensor:
        """What the codes of :meth:`quantize` stand for, fp32."""
        grid = self.grid(weight_OI, weight_OI.dtype).whole()
        codes_OGn = grid.codes(weight_OI.float().unflatten(1, (self.groups, self.group)))
        return codes_OGn.sub_(grid.zero).mul_(grid.scale).flatten(1)

    def keep(self, codes_OI: Tensor, grid: Grid) -> dict[str, Tensor]:
        """What is kept of codes, whole numbers from 0, of any dtype."""
        kept = {"weight": pack(codes_OI.to(torch.uint8), self.bits), SCALE: grid.scale.contiguous().view(torch.int32)}
        if not self.symmetric:
            kept[ZERO] = grid.zero.to(torch.uint8)
        return {**kept, ORDER: self.neighbours(codes_OI.device)} if self.ordered else kept

    def neighbours(self, device: torch.device) -> Tensor:
        """The group of each column ``[I]``, int32, where those of a group are neighbours."""
        return torch.arange(self.features[1], dtype=torch.int32, device=device) // self.group

    def dequantize(self, kept: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """``[O, I]`` of what :meth:`kept` names, in its order."""
        found = dict(zip(self.kept(), kept, strict=True))
        out_OI = torch.empty(self.features, dtype=dtype, device=kept[0].device)
        some = max(1, _AT_ONCE // self.features[1])
        for begin in range(0, self.features[0], some):  # in fp32, as scales are, of some rows at a time
            rows = slice(begin, begin + some)
            codes = unpack(found["weight"][rows], self.bits, self.features[1]).float()
            if not self.ordered:
                codes = codes.unflatten(1, (self.groups, self.group))

            def of_columns(x_OG: Tensor) -> Tensor:
                return x_OG.float().index_select(1, found[ORDER]) if self.ordered else x_OG.float()[..., None]

            zero = 2 ** (self.bits - 1) if self.symmetric else of_columns(found[ZERO][rows])
            out_OI[rows] = codes.sub_(zero).mul_(of_columns(found[SCALE].view(torch.float32)[rows])).flatten(1)
        return out_OI

    def grouped(self, kept: tuple[Tensor, ...]) -> GroupedCodes | None:
        """For products with the codes themselves, where groups are neighbours."""
        packed, scale_OG, *zero_OG = kept
        if self.features[1] % 2 or self.ordered:
            return None
        scale_OG, middle = scale_OG.view(torch.float32), 2 ** (self.bits - 1)
        offset_OG = (middle - zero_OG[0].float()) * scale_OG if zero_OG else None
        if self.bits == 4:
            numbers = torch.arange(-middle, middle, dtype=torch.float32, device=packed.device)
            return GroupedCodes(packed[:, : self.features[1] // 2], numbers, scale_OG, offset_OG)
        return GroupedCodes((packed[:, : self.features[1]] ^ middle).view(torch.int8), None, scale_OG, offset_OG)


def pack(codes_OI: Tensor, bits: int) -> Tensor:
    """uint8 codes by 8 / bits in a byte, the first in the low bits; rows are filled up to whole 32-bit words with zeros."""
    codes_OI = F.pad(codes_OI, (0, -codes_OI.shape[1] % (32 // bits)))
    return codes_OI if bits == 8 else codes_OI[:, 0::2] | (codes_OI[:, 1::2] << 4)


def unpack(packed: Tensor, bits: int, features: int) -> Tensor:
    """The codes ``[O, features]`` again."""
    codes_OI = packed if bits == 8 else torch.stack((packed & 15, packed >> 4), -1).flatten(1)
    return codes_OI[:, :features]
