"""int8: integers with a scale for each row, as LLM.int8() keeps weights (Dettmers et al. 2022, https://arxiv.org/abs/2208.07339).

In files ``X.weight`` are the codes int8 ``[O, I]`` and ``X.SCB`` the largest magnitude of each row fp32 ``[O]``; a weight is
``code · SCB / 127``. Products are of the dtype that activations have: bitsandbytes' own round these to 8 bits too, but for outliers.

Shape suffixes: O features out, I features in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fw.api import CausalLM, Quantized, StoredWeight, UserError
from fw.api.kernels import GroupedCodes
from fw_plugins.quantization.coded import CodedLinears, CodedWeight, Quantize, left_whole
from fw_plugins.quantization.four_bits import load_kernels

SCALE = "weight_absmax"
_MOST = 127
_AT_ONCE = 1 << 22
"""Weights that are in fp32 at a time."""
_SCB, _FORMAT = "SCB", "weight_format"


@dataclass(frozen=True)
class Rows:
    """How a weight ``[O, I]`` is kept: ``features`` are O and I."""

    features: tuple[int, int]

    def kept(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Codes, and the bits of the largest magnitudes."""
        return {"weight": (self.features, torch.int8), SCALE: ((self.features[0],), torch.int32)}

    def quantize(self, weight_OI: Tensor) -> dict[str, Tensor]:
        """Of the weight in fp16, as bitsandbytes does it."""
        codes_OI, absmax_O, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(weight_OI.to(torch.float16).contiguous(), 0.0)
        return {"weight": codes_OI, SCALE: absmax_O.float().view(torch.int32)}

    def dequantize(self, kept: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """``[O, I]`` of what :meth:`kept` names, in its order."""
        codes_OI, absmax_O = kept
        scale_O1 = (absmax_O.view(torch.float32) / _MOST)[:, None]
        dense_OI = torch.empty(self.features, dtype=dtype, device=codes_OI.device)
        # In fp32, since a scale rounded to 16 bits would be off for all of its row; some rows at a time, since that takes 4 bytes each.
        rows = max(1, _AT_ONCE // self.features[1])
        for dense, codes, scale in zip(dense_OI.split(rows), codes_OI.split(rows), scale_O1.split(rows), strict=True):
            dense.copy_(codes * scale)
        return dense_OI

    def grouped(self, kept: tuple[Tensor, ...]) -> GroupedCodes | None:
        """For products with the codes themselves: a row is a group."""
        codes_OI, absmax_O = kept
        return None if self.features[1] % 2 else GroupedCodes(codes_OI, None, absmax_O.view(torch.float32)[:, None] / _MOST, None)


@dataclass
class Int8Config:
    """Where."""

    skip: list[str] = field(default_factory=lambda: ["*lm_head", "*.gate"])
    """Linear layers that keep their weights, by name, where `*` stands for anything. By default the head and the routers of experts."""


class Int8(CodedLinears):
    """Linear layers keep 8-bit integers with a scale per row (bitsandbytes): half of bf16's bytes; activations are not rounded."""

    api = 1
    Config = Int8Config
    config: Int8Config
    packages = {"bitsandbytes": "fw[bitsandbytes]"}  # noqa: RUF012
    hf_methods = ("bitsandbytes",)

    def apply(self, model: CausalLM, compute: torch.dtype) -> Mapping[str, Quantized]:
        """Every linear layer but those to skip."""
        load_kernels()
        return super().apply(model, compute)

    def layout(self, name: str, features: tuple[int, int]) -> Rows:
        """A code for each weight."""
        return Rows(features)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], names: Collection[str]) -> Int8 | None:
        """Of layers that the files have codes for."""
        found = _stored(names)
        if not config.get("load_in_8bit") or not found:
            return None
        plugin = cls(Int8Config())
        plugin._in_files = frozenset(found)
        return plugin

    def hf_config(self, model: CausalLM) -> Mapping[str, Any]:
        """As transformers' BitsAndBytesConfig has it."""
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": False,
            "load_in_8bit": True,
            "llm_int8_threshold": 6.0,
            "llm_int8_has_fp16_weight": False,
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_skip_modules": left_whole(model),
        }

    def stored(self, names: Collection[str]) -> Mapping[str, tuple[str, ...]]:
        """By their scales."""
        return _stored(names)

    def open(self, name: str, read: Callable[[str], Tensor]) -> StoredWeight:
        """Of the codes' shape."""
        return Int8Weight(name, read)

    def written(self, name: str, weight: Quantized, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Codes, scales, and that they lie by rows."""
        assert isinstance(weight.quantize, Quantize)
        names, layer = weight.quantize.names(), name.removesuffix(".weight")
        return {
            name: values[names["weight"]].cpu(),
            f"{layer}.{_SCB}": values[names[SCALE]].cpu().view(torch.float32),
            f"{layer}.{_FORMAT}": torch.tensor(0, dtype=torch.uint8),
        }


class Int8Weight(CodedWeight):
    """One of a file. Its dtype before is not written there; bitsandbytes quantizes what is fp16.

    Raises:
        UserError: codes and scales that are not of one weight, or do not lie by rows.
    """

    layout: Rows

    def __init__(self, name: str, read: Callable[[str], Tensor]) -> None:
        super().__init__(name, torch.float16)
        self._read = read
        codes = read(name)
        if codes.dtype != torch.int8 or codes.dim() != 2:
            raise UserError(f"{name}: is {codes.dtype} of {codes.dim()} dimensions, and not codes of 8 bits")
        self.layout = Rows((codes.shape[0], codes.shape[1]))
        try:
            by_rows = not read(f"{name.removesuffix('.weight')}.{_FORMAT}").any()
        except KeyError:  # older files say nothing
            by_rows = True
        if not by_rows:
            raise UserError(f"{name}: its codes are in tiles of a GPU, not by rows; save it anew with a bitsandbytes of today")

    def values(self) -> dict[str, Tensor]:
        """In the order of :meth:`Rows.kept`."""
        absmax_O = self._read(f"{self._name.removesuffix('.weight')}.{_SCB}").float().flatten()
        if len(absmax_O) != self.layout.features[0]:
            raise UserError(f"{self._name}: has {self.layout.features[0]} rows of codes and {len(absmax_O)} scales")
        return {"weight": self._read(self._name), SCALE: absmax_O.view(torch.int32)}


def _stored(names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Weights with scales, and the names of all their tensors."""
    found = {}
    for name in names:
        layer, _, end = name.rpartition(".")
        if end == _SCB and f"{layer}.weight" in names:
            form = (f"{layer}.{_FORMAT}",) if f"{layer}.{_FORMAT}" in names else ()
            found[f"{layer}.weight"] = (f"{layer}.weight", name, *form)
    return found
