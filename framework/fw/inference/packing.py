"""Weights as the processor reads them best: for a model that no longer changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fw.errors import UserError
from fw.inference.low_rank import ChangedLinear
from fw.kernels import gpu_linear
from fw.kernels.grouped import GroupedCodes, GroupedLinear
from fw.kernels.linear import Int8Linear, PackedLinear, PlainLinear, Together, W8A8Linear, available, takes
from fw.kernels.room import Room
from fw.kinds.model import CausalLM
from fw.kinds.peft import LowRankChange
from fw.planned import empty_cache, on_gpu

_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_CODES, _APART = "grouped_codes", "apart"
"""Methods of layers that keep codes, and of those that a low-rank change is a part of."""
_MADE = {"auto": PackedLinear, "int8_weight_only": Int8Linear, "w8a8": W8A8Linear}


def pack(model: CausalLM, weights: str, dtype: torch.dtype, guesses: bool = False) -> int:
    """Replace plain linear layers in bfloat16 on the CPU, and those of codes that kernels compute with, one after another; how many.
    Weights that lie in files stay there.

    Args:
        weights: ``auto``, in the same memory; ``int8_weight_only`` and ``w8a8`` in half of it.
        dtype: that the model computes in.
        guesses: whether it guesses for another one, which is asked for codes, too: of this those layers have them that can.

    Raises:
        UserError: codes are asked for, and there is no layer to be kept so, or no compiler.
    """
    made = _MADE[weights]
    if not available():
        if weights == "auto":
            return 0
        raise UserError(f"inference.weights: {weights} wants a C++ compiler, which is not there: install g++, or set CXX")
    mapped = {tensor.data_ptr() for tensor in model.in_files.values()}
    replaced, made_here, room = 0, 0, Room()
    # Of those that are replaced none is held: each one's weight goes as soon as it is packed.
    for module in [
        module
        for module in model.modules()
        if any(takes(each) or hasattr(each, _CODES) or hasattr(each, _APART) for each in module.children())
    ]:
        for name in [name for name, _ in module.named_children()]:
            layer, change = _apart(getattr(module, name))
            if dtype == torch.bfloat16 and (codes := codes_of(layer)) is not None:
                assert isinstance(layer, nn.Linear)
                setattr(module, name, _changed(GroupedLinear(layer, codes, room), change))
                del codes
                replaced += 1
            elif takes(layer):
                assert isinstance(layer, nn.Linear)
                own = PlainLinear(layer) if layer.weight.data_ptr() in mapped else made(layer, room)
                setattr(module, name, _changed(own, change))
                del own
                replaced, made_here = replaced + 1, made_here + 1
            del layer, change
        for names in _SAME_INPUT:
            layers = [getattr(module, name, None) for name in names]
            changes = [layer.change.down for layer in layers if isinstance(layer, ChangedLinear)]
            _join([layer.layer if isinstance(layer, ChangedLinear) else layer for layer in layers])
            _join(changes if len(changes) == len(names) else [])
    if weights != "auto" and not guesses:
        _check_made(model, weights, dtype, made_here)
    return replaced


def _apart(layer: nn.Module) -> tuple[nn.Module, LowRankChange | None]:
    """What kernels compute, each its own part."""
    ask = getattr(layer, _APART, None)
    found = None if ask is None else ask()
    return (layer, None) if found is None else found


def _changed(layer: PackedLinear, change: LowRankChange | None) -> nn.Module:
    return layer if change is None else ChangedLinear(layer, change)


def _join(layers: Sequence[Any]) -> None:
    """Compute them together, where one kernel does."""
    if layers and all(isinstance(layer, PackedLinear) for layer in layers) and len({layer.kind for layer in layers}) == 1:
        Together.join(layers)


def products_of_torch(model: CausalLM) -> bool:
    """Whether a packed model has layers left whose products are torch's: adapted ones, experts, codes that no kernel takes."""
    return any(isinstance(module, nn.Linear) for module in model.modules()) or any(p.dim() > 2 for p in model.parameters())


def _check_made(model: CausalLM, weights: str, dtype: torch.dtype, made: int) -> None:
    """There is something that was asked for."""
    if dtype != torch.bfloat16 or on_gpu(next(model.parameters())):
        raise UserError(
            f"inference.weights: {weights} is of layers in bfloat16 on the CPU; set inference.dtype: bf16, inference.device: cpu"
        )
    adapted = sum(isinstance(module, nn.Linear) and not hasattr(module, _CODES) for module in model.modules())
    if adapted and model.adapters is not None:
        raise UserError(
            f"inference.weights: {weights} is of layers as they are, and an adapter changes {adapted} of them by more than low rank; merge"
            " it: fw checkpoint merge"
        )
    if not made:
        raise UserError(
            f"inference.weights: {weights} is of plain layers in bfloat16 on the CPU, and the model has none: where its layers are codes"
            " already, leave it out; quantization=none makes weights of them"
        )


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


def codes_of(layer: nn.Module) -> GroupedCodes | None:
    """That a kernel computes with."""
    ask = getattr(layer, _CODES, None)
    found = None if ask is None else ask()
    return found if isinstance(found, GroupedCodes) and GroupedLinear.takes(found) else None
