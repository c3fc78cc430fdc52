"""nf4 and fp4."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fw.api import CausalLM, Quantized, StoredWeight, UserError
from fw_plugins.quantization import bitsandbytes_files
from fw_plugins.quantization.coded import CodedLinears, left_whole
from fw_plugins.quantization.four_bits import Layout, load_kernels

_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass
class FourBitConfig:
    """How values become codes, and where."""

    block_size: int = 64
    """Values that share a scale: smaller ones are more accurate, and keep more scales (4 bytes each, with double quantization 1)."""
    double_quantization: bool = True
    """Keep the scales in 8 bits: 0.516 bytes per weight instead of 0.5625 (with blocks of 64)."""
    compute_dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """What products with these weights are computed in, and what a weight is while its layer computes: 2 bytes each, or 4. `auto` is what
    `precision` computes in; another one costs a copy of what the layer sees and gives, whose dtypes stay those of `precision`."""
    skip: list[str] = field(default_factory=lambda: ["*lm_head", "*.gate"])
    """Linear layers that keep their weights, by name, where `*` stands for anything. By default the head and the routers of experts."""

    def __post_init__(self) -> None:
        if self.block_size not in _BLOCKS:
            raise UserError(f"quantization.block_size: {self.block_size} is not among {', '.join(map(str, _BLOCKS))}")


class NF4(CodedLinears):
    """Linear layers keep 4-bit NormalFloat codes (bitsandbytes): about a quarter of bf16's bytes; weights exist one layer at a time."""

    api = 1
    Config = FourBitConfig
    config: FourBitConfig
    packages = {"bitsandbytes": "fw[bitsandbytes]"}  # noqa: RUF012
    hf_methods = ("bitsandbytes",)
    quant_type: ClassVar[str] = "nf4"

    def computes_in(self) -> torch.dtype | None:
        """As the option says."""
        return _DTYPES.get(self.config.compute_dtype)

    def apply(self, model: CausalLM, compute: torch.dtype) -> Mapping[str, Quantized]:
        """Every linear layer but those to skip."""
        load_kernels()
        return super().apply(model, compute)

    def layout(self, name: str, features: tuple[int, int]) -> Layout:
        """Two codes a byte."""
        if features[1] % 2:
            raise UserError(f"quantization.skip: {name} has {features[1]} features, an odd number, and codes go by two; skip it")
        return Layout(features, self.quant_type, self.config.block_size, self.config.double_quantization)

    def layout_in_files(self, name: str, read: Callable[[str], Tensor]) -> Layout:
        """As each weight's own description has it: the size of blocks is said nowhere else."""
        layout = bitsandbytes_files.FourBitWeight(name, self.quant_type, read).layout
        if layout.features[1] % 2:
            raise UserError(f"{name}: has {layout.features[1]} features, an odd number, and codes go by two; take the plain weights")
        return layout

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], names: Collection[str]) -> NF4 | None:
        """Of layers that the files have codes for."""
        found = bitsandbytes_files.stored(names, cls.quant_type)
        if not config.get("load_in_4bit") or not found:
            return None
        plugin = cls(FourBitConfig(double_quantization=bool(config.get("bnb_4bit_use_double_quant"))))
        plugin._in_files = frozenset(found)
        return plugin

    def hf_config(self, model: CausalLM) -> Mapping[str, Any]:
        """As transformers' BitsAndBytesConfig has it."""
        compute = self.computes_in() or next(iter(model.quantized.values())).dtype
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": self.quant_type,
            "bnb_4bit_use_double_quant": self.config.double_quantization,
            "bnb_4bit_compute_dtype": str(compute).removeprefix("torch."),
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": left_whole(model),
        }

    def stored(self, names: Collection[str]) -> Mapping[str, tuple[str, ...]]:
        """By the tensor that describes each."""
        return bitsandbytes_files.stored(names, self.quant_type)

    def open(self, name: str, read: Callable[[str], Tensor]) -> StoredWeight:
        """In the layout that its own description says."""
        return bitsandbytes_files.FourBitWeight(name, self.quant_type, read)

    def written(self, name: str, weight: Quantized, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Codes, scales, tables, and what describes them."""
        return bitsandbytes_files.written(name, weight, values)


class FP4(NF4):
    """Linear layers keep 4-bit floating-point codes (bitsandbytes): as many bytes as nf4, less accurate for weights as they usually are."""

    hf_methods = ("bitsandbytes",)
    quant_type = "fp4"
