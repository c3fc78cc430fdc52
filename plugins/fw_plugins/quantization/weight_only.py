"""w4a16 and w8a16: integers with scales by groups, as compressed-tensors' files hold them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from fw.api import CausalLM, Quantized, StoredWeight, UserError
from fw_plugins.quantization import compressed_tensors_files as files
from fw_plugins.quantization.coded import CodedLinears, Quantize, left_whole
from fw_plugins.quantization.gptq import gptq
from fw_plugins.quantization.grouped import Grouped


@dataclass
class WeightOnlyConfig:
    """How values become codes, and where."""

    group_size: int = 128
    """Neighbours in a row that share a scale, a divisor of every layer's features in: smaller ones are more accurate, and keep more scales
    (4 bytes each; 2 in files of 16-bit models). -1: one scale for a row."""
    symmetric: bool = True
    """Zero is the middle of the codes. Off: codes spread over what a group has, which keeps a byte more per group."""
    skip: list[str] = field(default_factory=lambda: ["*lm_head", "*.gate"])
    """Linear layers that keep their weights, by name, where `*` stands for anything. By default the head and the routers of experts."""

    def __post_init__(self) -> None:
        if self.group_size < 1 and self.group_size != -1:
            raise UserError(f"quantization.group_size: {self.group_size} is too small; the least is 1, and -1 makes one of each row")


def grouped_layout(config: WeightOnlyConfig, bits: int, name: str, features: tuple[int, int]) -> Grouped:
    """Of a layer's weight.

    Raises:
        UserError: groups do not divide its rows; what would.
    """
    size = features[1] if config.group_size == -1 else config.group_size
    if features[1] % size:
        fitting = [n for n in (256, 128, 64, 32, 16, 8) if features[1] % n == 0]
        raise UserError(
            f"quantization.group_size: {size} does not divide the {features[1]} features of {name}; what does: "
            f"{', '.join(map(str, fitting)) or 'none that is usual'}, or -1 for whole rows; or skip the layer"
        )
    return Grouped(features, bits, size, config.symmetric)


class W4A16(CodedLinears):
    """Linear layers keep 4-bit integers with a scale per group: about 0.53 bytes per weight; weights exist one layer at a time."""

    api = 1
    Config = WeightOnlyConfig
    config: WeightOnlyConfig
    hf_methods = ("compressed-tensors",)
    bits: ClassVar[int] = 4
    methods = ("rtn", "gptq")

    def layout(self, name: str, features: tuple[int, int]) -> Grouped:
        """In groups that divide the row."""
        return grouped_layout(self.config, self.bits, name, features)

    def calibrate(self, weight: Quantized, weight_OI: Tensor, gram_II: Tensor, method: str) -> Mapping[str, Tensor]:
        """By GPTQ."""
        assert isinstance(weight.quantize, Quantize) and isinstance(weight.quantize.layout, Grouped) and method == "gptq"
        return weight.quantize.named(gptq(weight_OI, gram_II, weight.quantize.layout))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], names: Collection[str]) -> W4A16 | None:
        """Of layers that the files have codes for."""
        scheme = files.scheme(config, names)
        found = files.stored(names)
        if scheme is None or scheme.bits != cls.bits or not found:
            return None
        plugin = cls(WeightOnlyConfig(scheme.group_size, scheme.symmetric))
        plugin._in_files = frozenset(found)
        return plugin

    def hf_config(self, model: CausalLM) -> Mapping[str, Any]:
        """As compressed-tensors has it, which transformers and vLLM read."""
        stacked = any(of.index is not None for name in model.base() for of in model.hf_tensors(name))
        whole = [*left_whole(model), *(files.EXPERTS if stacked else ())]
        return files.written_config(files.Scheme(self.bits, self.config.group_size, self.config.symmetric), whole)

    def stored(self, names: Collection[str]) -> Mapping[str, tuple[str, ...]]:
        """By their packed codes."""
        return files.stored(names)

    def open(self, name: str, read: Callable[[str], Tensor]) -> StoredWeight:
        """In the layout that its tensors' shapes say."""
        return files.PackedWeight(name, self.bits, self.config.symmetric, read)

    def written(self, name: str, weight: Quantized, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Packed codes, scales, and the shape."""
        return files.written(name, weight, values)


class W8A16(W4A16):
    """Linear layers keep 8-bit integers with a scale per group: about 1.03 bytes per weight, and hardly an error."""

    hf_methods = ("compressed-tensors",)
    bits = 8
