"""Weights as the processor reads them best: for a model that no longer changes."""

from __future__ import annotations

from torch import nn

from fw.errors import UserError
from fw.kernels.linear import Int8Linear, PackedLinear, Together, W8A8Linear, available, takes
from fw.kinds.model import CausalLM

_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_MADE = {"auto": PackedLinear, "int8_weight_only": Int8Linear, "w8a8": W8A8Linear}


def pack(model: CausalLM, weights: str) -> int:
    """Replace plain linear layers in bfloat16 on the CPU, one after another; how many.

    Args:
        weights: ``auto``, in the same memory; ``int8_weight_only`` and ``w8a8`` in half of it.

    Raises:
        UserError: codes are asked for, and there is no layer to be kept so, or no compiler.
    """
    made = _MADE[weights]
    if not available():
        if weights == "auto":
            return 0
        raise UserError(f"inference.weights: {weights} wants a C++ compiler, which is not there: install g++, or set CXX")
    replaced = 0
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if takes(layer):
                assert isinstance(layer, nn.Linear)
                setattr(module, name, made(layer))
                replaced += 1
        for names in _SAME_INPUT:
            layers = [each for name in names if isinstance(each := getattr(module, name, None), PackedLinear)]
            if len(layers) == len(names):
                Together.join(layers)
    if not replaced and weights != "auto":
        raise UserError(
            f"inference.weights: {weights} is of layers in bfloat16 on the CPU, and the model has none; set inference.dtype: bf16"
        )
    return replaced
