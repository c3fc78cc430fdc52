"""w4a16 and w8a16: integers with scales by groups, as files of compressed-tensors, AutoGPTQ and AutoAWQ hold them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from fw.api import CausalLM, Quantized, StoredWeight, UserError
from fw_plugins.quantization import columns_files, compressed_tensors_files as files
from fw_plugins.quantization.coded import CodedLinears, Quantize, left_whole
from fw_plugins.quantization.gptq import gptq
from fw_plugins.quantization.grouped import Grouped
from fw_plugins.quantization.grouped_files import GroupedFiles, Scheme

_READERS: dict[str, Callable[[Mapping[str, Any], Collection[str]], GroupedFiles | None]] = {
    files.METHOD: files.read_config,
    columns_files.GPTQ: columns_files.read_gptq,
    columns_files.AWQ: columns_files.read_awq,
}


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
    hf_methods: ClassVar[tuple[str, ...]] = ("compressed-tensors", "gptq", "awq")
    bits: ClassVar[int] = 4
    methods = ("rtn", "gptq")
    _files: GroupedFiles | None = None
    """That it was made for."""

    def layout(self, name: str, features: tuple[int, int]) -> Grouped:
        """In groups that divide the row."""
        return grouped_layout(self.config, self.bits, name, features)

    def layout_in_files(self, name: str, read: Callable[[str], Tensor]) -> Grouped | None:
        """As these files say it of each."""
        return None if self._files is None else self._files.layout(name, read)

    def calibrate(self, weight: Quantized, weight_OI: Tensor, gram_II: Tensor, method: str) -> Mapping[str, Tensor]:
        """By GPTQ."""
        assert isinstance(weight.quantize, Quantize) and isinstance(weight.quantize.layout, Grouped) and method == "gptq"
        return weight.quantize.named(gptq(weight_OI, gram_II, weight.quantize.layout))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], names: Collection[str]) -> W4A16 | None:
        """Of layers that the files have codes for."""
        found = _READERS[str(config.get("quant_method"))](config, names)
        if found is None or found.scheme.bits != cls.bits or not (stored := found.stored(names)):
            return None
        plugin = cls(WeightOnlyConfig(found.scheme.group_size, found.scheme.symmetric))
        plugin._in_files, plugin._files = frozenset(stored), found
        return plugin

    def hf_config(self, model: CausalLM) -> Mapping[str, Any]:
        """As compressed-tensors has it, which transformers and vLLM read.

        Raises:
            UserError: groups are no neighbours.
        """
        for name, weight in model.quantized.items():
            if isinstance(weight.quantize, Quantize) and isinstance(weight.quantize.layout, Grouped) and weight.quantize.layout.ordered:
                raise UserError(
                    f"{name}: its columns are in groups by the size of their inputs (desc_act), which files of compressed-tensors"
                    " have no place for; load the model with quantization='none' and save the weights"
                )
        stacked = any(of.index is not None for name in model.base() for of in model.hf_tensors(name))
        whole = [*left_whole(model), *(files.EXPERTS if stacked else ())]
        coded = [of.name.removesuffix(".weight") for name in model.quantized for of in model.hf_tensors(name)]
        return files.written_config(Scheme(self.bits, self.config.group_size, self.config.symmetric), whole, coded)

    def stored(self, names: Collection[str]) -> Mapping[str, tuple[str, ...]]:
        """By their codes."""
        assert self._files is not None
        return self._files.stored(names)

    def open(self, name: str, read: Callable[[str], Tensor]) -> StoredWeight:
        """In the layout that its tensors say."""
        assert self._files is not None
        return self._files.open(name, read)

    def written(self, name: str, weight: Quantized, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Packed codes, scales, and the shape."""
        return files.written(name, weight, values)


class W8A16(W4A16):
    """Linear layers keep 8-bit integers with a scale per group: about 1.03 bytes per weight, and hardly an error."""

    hf_methods = ("compressed-tensors", "gptq")
    bits = 8
