"""Weights as the processor reads them best: for a model that no longer changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fw.errors import UserError
from fw.kernels import gpu_linear
from fw.kernels.grouped import GroupedCodes, GroupedLinear
from fw.kernels.linear import Int8Linear, PackedLinear, PlainLinear, Together, W8A8Linear, available, takes
from fw.kernels.room import Room
from fw.kinds.model import CausalLM
from fw.planned import empty_cache

_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_CODES = "grouped_codes"
"""Method of a layer that keeps codes."""
_MADE = {"auto": PackedLinear, "int8_weight_only": Int8Linear, "w8a8": W8A8Linear}


def pack(model: CausalLM, weights: str, dtype: torch.dtype) -> int:
    """Replace plain linear layers in bfloat16 on the CPU, and those of codes that kernels compute with, one after another; how many.
    Weights that lie in files stay there.

    Args:
        weights: ``auto``, in the same memory; ``int8_weight_only`` and ``w8a8`` in half of it.
        dtype: that the model computes in.

    Raises:
        UserError: codes are asked for, and there is no layer to be kept so, or no compiler.
    """
    made = _MADE[weights]
    if not available():
        if weights == "auto":
            return 0
        raise UserError(f"inference.weights: {weights} wants a C++ compiler, which is not there: install g++, or set CXX")
    mapped = {tensor.data_ptr() for tensor in model.in_files.values()}
    replaced, room = 0, Room()
    # Of those that are replaced none is held: each one's weight goes as soon as it is packed.
    for module in [
        module for module in model.modules() if any(takes(each) or hasattr(each, "grouped_codes") for each in module.children())
    ]:
        for name, layer in list(module.named_children()):
            if dtype == torch.bfloat16 and (codes := _codes(layer)) is not None:
                assert isinstance(layer, nn.Linear)
                setattr(module, name, GroupedLinear(layer, codes, room))
                del codes
                replaced += 1
            elif takes(layer):
                assert isinstance(layer, nn.Linear)
                setattr(module, name, PlainLinear(layer) if layer.weight.data_ptr() in mapped else made(layer, room))
                replaced += 1
        for names in _SAME_INPUT:
            layers = [each for name in names if isinstance(each := getattr(module, name, None), PackedLinear)]
            if len(layers) == len(names) and len({layer.kind for layer in layers}) == 1:
                Together.join(layers)
    if not replaced and weights != "auto":
        raise UserError(
            f"inference.weights: {weights} is of layers in bfloat16 on the CPU, and the model has none; set inference.dtype: bf16"
        )
    return replaced


def join(model: CausalLM) -> None:
    """Compute plain layers on a GPU together that are given the same. Each one's weight goes as soon as it is part of another. Those whose
    weights come from elsewhere stay as they are."""
    apart = {id(model.get_parameter(name)) for name in model.elsewhere}
    wanted = [(module, names) for module in model.modules() for names in _SAME_INPUT if hasattr(module, names[0])]
    for module, names in wanted:
        layers: list[Any] = [getattr(module, name, None) for name in names]
        if not gpu_linear.takes(layers) or any(id(layer.weight) in apart for layer in layers):
            continue
        for name, layer in zip(names, gpu_linear.joined(layers), strict=True):
            setattr(module, name, layer)
        layers.clear()
        empty_cache()  # what they were fits none of those that follow


def _codes(layer: nn.Module) -> GroupedCodes | None:
    """That a kernel computes with."""
    ask = getattr(layer, _CODES, None)
    found = None if ask is None else ask()
    return found if isinstance(found, GroupedCodes) and GroupedLinear.takes(found) else None
