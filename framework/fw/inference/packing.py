"""Weights as the processor reads them best: for a model that no longer changes."""

from __future__ import annotations

from torch import nn

from fw.kernels.linear import PackedLinear, available
from fw.kinds.model import CausalLM


def pack(model: CausalLM) -> int:
    """Replace plain linear layers in bfloat16 on the CPU, each by one that takes the same memory; how many."""
    if not available():
        return 0
    replaced = 0
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if PackedLinear.takes(layer):
                assert isinstance(layer, nn.Linear)
                setattr(module, name, PackedLinear(layer))
                replaced += 1
    return replaced
