"""Grouped integers in files, in the ``pack-quantized`` form of compressed-tensors, which transformers and vLLM read.

Of ``X.weight`` there are ``X.weight_packed``, 32-bit words of codes ``[O, I · bits / 32]``, the first code in the low bits;
``X.weight_scale`` ``[O, G]``; ``X.weight_shape``, O and I; and, where codes are asymmetric, ``X.weight_zero_point``, packed along O, or,
as versions to 0.9.3 wrote it, int8 ``[O, G]``, counted from the middle of the codes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from fw.api import Quantized, UserError
from fw_plugins.quantization.coded import CodedWeight, Quantize
from fw_plugins.quantization.grouped import SCALE, ZERO, Grouped, pack, unpack
from fw_plugins.quantization.grouped_files import GroupedFiles, Scheme

METHOD, FORM = "compressed-tensors", "pack-quantized"
EXPERTS = ("re:.*[.]experts([.].*)?",)
"""Layers of stacked experts, as ``ignore`` names them."""
_PACKED, _SHAPE, _ORDER = "_packed", "_shape", "_g_idx"


def read_config(config: Mapping[str, Any], names: Collection[str]) -> PackedFiles | None:
    """None where it is another form, or something besides weights is quantized, or groups are no neighbours."""
    groups = list((config.get("config_groups") or {}).values())
    if config.get("format") != FORM or len(groups) != 1 or any(name.endswith(_ORDER) for name in names):
        return None
    weights = groups[0].get("weights") or {}
    if groups[0].get("input_activations") or config.get("kv_cache_scheme") or weights.get("type") != "int":
        return None
    strategy = weights.get("strategy")
    if strategy not in ("group", "channel"):
        return None
    size = int(weights["group_size"]) if strategy == "group" else -1
    return PackedFiles(Scheme(int(weights.get("num_bits", 0)), size, bool(weights.get("symmetric", True))))


def written_config(found: Scheme, whole: Collection[str], coded: Collection[str]) -> dict[str, Any]:
    """The ``quantization_config`` of a model, of which the linear layers ``whole`` keep their weights, and those ``coded`` do not."""
    weights = {
        "num_bits": found.bits,
        "type": "int",
        "symmetric": found.symmetric,
        "strategy": "channel" if found.group_size == -1 else "group",
        "group_size": None if found.group_size == -1 else found.group_size,
        "dynamic": False,
        "observer": "minmax",
        "actorder": None,
        "block_structure": None,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": METHOD,
        "format": FORM,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        # The head is a layer of its own there, also where its weights are the embedding's.
        "ignore": sorted({*whole, "lm_head"}.difference(coded)),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


class PackedFiles(GroupedFiles):
    """Of a directory."""

    def stored(self, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        """By their packed codes."""
        found = {}
        for name in names:
            if name.endswith(f".weight{_PACKED}"):
                weight = name.removesuffix(_PACKED)
                beside = (_beside(weight, SCALE), f"{weight}{_SHAPE}", _beside(weight, ZERO))
                found[weight] = (name, *(part for part in beside if part in names))
        return found

    def open(self, name: str, read: Callable[[str], Tensor]) -> PackedWeight:
        """In the layout that its tensors' shapes say."""
        return PackedWeight(name, self.scheme.bits, self.scheme.symmetric, read)


def _beside(weight: str, key: str) -> str:
    return f"{weight.removesuffix('weight')}{key}"


class PackedWeight(CodedWeight):
    """One of them. What it is made of is read when it is asked for.

    Raises:
        UserError: its tensors do not fit one another.
    """

    layout: Grouped

    def __init__(self, name: str, bits: int, symmetric: bool, read: Callable[[str], Tensor]) -> None:
        self._read, self._scale_OG = read, read(_beside(name, SCALE))
        super().__init__(name, self._scale_OG.dtype)
        shape = tuple(int(size) for size in read(f"{name}{_SHAPE}").tolist())
        rows, groups = self._scale_OG.shape
        if len(shape) != 2 or shape[0] != rows or shape[1] % groups:
            raise UserError(f"{name}: scales {list(self._scale_OG.shape)} do not divide a weight {list(shape)}")
        self.layout = Grouped((shape[0], shape[1]), bits, shape[1] // groups, symmetric)

    def values(self) -> dict[str, Tensor]:
        """In the order of :meth:`Grouped.kept`."""
        bits, (rows, _) = self.layout.bits, self.layout.features
        packed = self._read(f"{self._name}{_PACKED}").contiguous().view(torch.uint8)
        expected = self.layout.kept()["weight"][0]
        if tuple(packed.shape) != expected:
            raise UserError(f"{self._name}: {list(packed.shape)} bytes of codes, where a weight {list(self.shape)} has {list(expected)}")
        found = {"weight": packed, SCALE: self._scale_OG.float().contiguous().view(torch.int32)}
        if self.layout.symmetric:
            return found
        zero = self._read(_beside(self._name, ZERO))
        if zero.dtype == torch.int8 and zero.shape == self._scale_OG.shape:
            return {**found, ZERO: (zero.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)}
        words = [-(-rows * bits // 32), self.layout.groups]
        if zero.dtype != torch.int32 or list(zero.shape) != words:
            raise UserError(
                f"{self._name}: zero points {list(zero.shape)} of {zero.dtype} are neither words {words} of torch.int32, nor torch.int8"
                f" {list(self._scale_OG.shape)}; take a directory of the plain weights"
            )
        return {**found, ZERO: unpack(zero.t().contiguous().view(torch.uint8), bits, rows).t().contiguous()}


def written(name: str, weight: Quantized, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A weight's tensors, by name."""
    assert isinstance(weight.quantize, Quantize)
    layout = weight.quantize.layout
    assert isinstance(layout, Grouped)
    kept = {key: values[full].cpu() for key, full in weight.quantize.names().items()}
    found = {
        f"{name}{_PACKED}": kept["weight"].contiguous().view(torch.int32),
        _beside(name, SCALE): kept[SCALE].view(torch.float32).to(weight.dtype),
        f"{name}{_SHAPE}": torch.tensor(layout.features, dtype=torch.int64),
    }
    if not layout.symmetric:
        packed_GO = pack(kept[ZERO].t().contiguous(), layout.bits).view(torch.int32)
        found[_beside(name, ZERO)] = packed_GO.t().contiguous()
    return found
