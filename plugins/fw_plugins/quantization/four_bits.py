"""Weights as 4-bit codes, in the layout of bitsandbytes, by its kernels.

A block is 64 values (or another power of two) of the flattened weight and keeps one scale, its largest magnitude; a code is the nearest of
16 numbers (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314, sections 2 and 3). With double quantization the scales, less their mean,
are 8-bit codes themselves, in blocks of 256 with a scale each: 0.516 bytes per weight, else 0.5625.

Shape suffixes: O features out, I features in, N blocks, M blocks of their scales.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from fw.api.kernels import GroupedCodes

NESTED_BLOCK = 256
ABSMAX, NESTED, OFFSET = "weight_absmax", "weight_nested", "weight_offset"


def load_kernels() -> None:
    """Register bitsandbytes' operators; it tells of kernels that it looks for on a hub, and that are not needed here."""
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with torch.device("cpu"):  # models are built on the meta device, where tensors that a module makes for itself would be lost
            importlib.import_module("bitsandbytes")
            _numbers()
    finally:
        logger.setLevel(level)


@dataclass(frozen=True)
class Layout:
    """How a weight ``[O, I]`` is kept.

    Attributes:
        features: O and I.
        quant_type: ``nf4`` or ``fp4``.
        block: values that share a scale.
        nested: whether scales are codes, too.
    """

    features: tuple[int, int]
    quant_type: str
    block: int
    nested: bool

    def kept(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of a layer's parameters, by name."""
        out, into = self.features
        blocks = -(-out * into // self.block)
        codes = {"weight": ((out, into // 2), torch.uint8)}
        if not self.nested:
            return {**codes, ABSMAX: ((blocks,), torch.int32)}
        scales = -(-blocks // NESTED_BLOCK)
        return {**codes, ABSMAX: ((blocks,), torch.uint8), NESTED: ((scales,), torch.int32), OFFSET: ((1,), torch.int32)}

    def quantize(self, weight_OI: Tensor) -> dict[str, Tensor]:
        """What is kept of a weight."""
        flat = weight_OI.contiguous().view(-1)
        if flat.device.type == "cpu" and flat.numel() > _AT_ONCE:
            codes = flat.new_empty(flat.numel() // 2, dtype=torch.uint8)
            absmax_N = flat.new_empty(-(-flat.numel() // self.block), dtype=torch.float32)
            for values, part, scales in zip(
                flat.split(_AT_ONCE), codes.split(_AT_ONCE // 2), absmax_N.split(_AT_ONCE // self.block), strict=True
            ):
                found, largest = torch.ops.bitsandbytes.quantize_4bit(values, self.block, self.quant_type, torch.uint8)
                part.copy_(found.view(-1))
                scales.copy_(largest)
        else:
            codes, absmax_N = torch.ops.bitsandbytes.quantize_4bit(flat, self.block, self.quant_type, torch.uint8)
        kept = {"weight": codes.view(self.features[0], -1)}
        if not self.nested:
            return {**kept, ABSMAX: absmax_N.view(torch.int32)}
        offset = absmax_N.mean()
        inner_N, scales_M = torch.ops.bitsandbytes.quantize_blockwise(absmax_N - offset, _table(absmax_N), NESTED_BLOCK)
        return {**kept, ABSMAX: inner_N, NESTED: scales_M.view(torch.int32), OFFSET: offset.view(1).view(torch.int32)}

    def dequantize(self, kept: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """``[O, I]`` of what :meth:`kept` names, in its order."""
        codes, *scales = kept
        absmax_N = self._absmax(*scales)
        dense: Tensor = torch.ops.bitsandbytes.dequantize_4bit(codes, absmax_N, self.block, self.quant_type, self.features, dtype)
        return dense

    def grouped(self, kept: tuple[Tensor, ...]) -> GroupedCodes | None:
        """For products with the codes themselves, where rows are whole blocks."""
        codes, *scales = kept
        if self.features[1] % self.block:
            return None
        first_in_the_low_bits = codes << 4 | codes >> 4
        return GroupedCodes(first_in_the_low_bits, tables(self.quant_type)[0], self._absmax(*scales).view(self.features[0], -1), None)

    def _absmax(self, absmax_N: Tensor, scales_M: Tensor | None = None, offset: Tensor | None = None) -> Tensor:
        """Of each block, fp32."""
        if scales_M is None or offset is None:
            return absmax_N.view(torch.float32)
        table, scales_M = _table(absmax_N), scales_M.view(torch.float32)
        found: Tensor = torch.ops.bitsandbytes.dequantize_blockwise(absmax_N, scales_M, table, NESTED_BLOCK, torch.float32)
        return found.add_(offset.view(torch.float32))


_AT_ONCE = 1 << 20
"""Values: the CPU's kernel takes 14 bytes for each of those that it is given. A multiple of every block size."""


def tables(quant_type: str) -> tuple[Tensor, Tensor]:
    """What the 16 codes of a weight stand for, and the 256 of a scale; on the CPU."""
    from bitsandbytes.functional import get_4bit_type

    load_kernels()
    return get_4bit_type(quant_type, device="cpu"), torch.tensor(_numbers(), device="cpu")


_tables: dict[torch.device, Tensor] = {}


def _table(scales: Tensor) -> Tensor:
    """The 256 numbers that a scale's code stands for, where the scales are."""
    # A plan's has no values, and ends with the plan.
    tables = vars(scales.fake_mode).setdefault("fw_tables", {}) if isinstance(scales, FakeTensor) else _tables
    if scales.device not in tables:
        tables[scales.device] = torch.tensor(_numbers(), device=scales.device)
    table: Tensor = tables[scales.device]
    return table


@cache
def _numbers() -> tuple[float, ...]:
    from bitsandbytes.functional import create_dynamic_map

    return tuple(create_dynamic_map().tolist())
