"""4-bit weights in files, as bitsandbytes writes and transformers reads them.

Beside ``X.weight``, the codes uint8 ``[O · I / 2, 1]``, there are its scales, the tables that codes stand for, and what else there is to
know as JSON in a uint8 tensor whose name ends in the kind of codes (``QuantState.as_dict`` of bitsandbytes).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from fw.api import Quantized, UserError
from fw_plugins.quantization.coded import CodedWeight, Quantize
from fw_plugins.quantization.four_bits import ABSMAX, NESTED, NESTED_BLOCK, OFFSET, Layout, tables

STATE = "quant_state.bitsandbytes__"
_BESIDE = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


def stored(names: Collection[str], quant_type: str) -> dict[str, tuple[str, ...]]:
    """Weights of a kind of codes, and the names of all their tensors."""
    end, found = f".{STATE}{quant_type}", {}
    for name in names:
        if name.endswith(end):
            weight = name.removesuffix(end)
            beside = (f"{weight}.{part}" for part in _BESIDE)
            found[weight] = (weight, name, *(part for part in beside if part in names))
    return found


class FourBitWeight(CodedWeight):
    """One of them. What it is made of is read when it is asked for.

    Raises:
        UserError: its description is none, or of something that is not known here.
    """

    layout: Layout

    def __init__(self, name: str, quant_type: str, read: Callable[[str], Tensor]) -> None:
        self._read = read
        try:
            state: dict[str, Any] = json.loads(bytes(read(f"{name}.{STATE}{quant_type}").tolist()))
            out, into = (int(size) for size in state["shape"])
            nested = "nested_offset" in state
            self.layout = Layout((out, into), quant_type, int(state["blocksize"]), nested)
            super().__init__(name, getattr(torch, state["dtype"]))
            self._offset = float(state["nested_offset"]) if nested else 0.0
            known = state["quant_type"] == quant_type and (not nested or state["nested_blocksize"] == NESTED_BLOCK)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{name}: {STATE}{quant_type} does not describe a weight ({type(error).__name__}: {error})") from None
        if not known or not isinstance(self._dtype, torch.dtype):
            raise UserError(f"{name}: codes of another kind than are known here: {state}")

    def values(self) -> dict[str, Tensor]:
        """In the order of :meth:`Layout.kept`."""
        codes, absmax = self._read(self._name), self._read(f"{self._name}.absmax")
        table = self._read(f"{self._name}.quant_map")
        expected, nested_expected = tables(self.layout.quant_type)
        if not torch.equal(table.float(), expected):
            raise UserError(f"{self._name}: its codes stand for other numbers than {self.layout.quant_type}'s")
        codes = codes.contiguous().view(torch.uint8).flatten()
        rows = self.layout.features[0]
        found = {"weight": codes if codes.numel() % rows else codes.view(rows, -1)}
        if not self.layout.nested:
            return {**found, ABSMAX: absmax.float().view(torch.int32)}
        if not torch.equal(self._read(f"{self._name}.nested_quant_map").float(), nested_expected):
            raise UserError(f"{self._name}: its scales' codes stand for other numbers than bitsandbytes' own")
        offset = torch.tensor([self._offset], dtype=torch.float32)
        nested = self._read(f"{self._name}.nested_absmax").float()
        return {**found, ABSMAX: absmax, NESTED: nested.view(torch.int32), OFFSET: offset.view(torch.int32)}


def written(name: str, weight: Quantized, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A weight's tensors, by name."""
    assert isinstance(weight.quantize, Quantize)
    layout = weight.quantize.layout
    assert isinstance(layout, Layout)
    kept = {key: values[full].cpu() for key, full in weight.quantize.names().items()}
    table, nested_table = tables(layout.quant_type)
    state: dict[str, Any] = {
        "quant_type": layout.quant_type,
        "blocksize": layout.block,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "shape": list(layout.features),
    }
    found = {name: kept["weight"].reshape(-1, 1), f"{name}.quant_map": table}
    if layout.nested:
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": kept[OFFSET].view(torch.float32).item()}
        found |= {
            f"{name}.absmax": kept[ABSMAX],
            f"{name}.nested_absmax": kept[NESTED].view(torch.float32),
            f"{name}.nested_quant_map": nested_table,
        }
    else:
        found[f"{name}.absmax"] = kept[ABSMAX].view(torch.float32)
    found[f"{name}.{STATE}{layout.quant_type}"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return found
