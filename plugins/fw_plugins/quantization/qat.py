"""Quantization-aware training: products are of the weights that codes would stand for, and the weights themselves train.

The gradient of a weight is that of what it is rounded to (the straight-through estimator, Bengio et al. 2013, https://arxiv.org/abs/1308.3432).
Rounded weights exist one layer at a time, in forward and again in backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fw.api import CausalLM, Conflicts, QuantizationPlugin, Quantized, UserError
from fw_plugins.quantization.coded import linears
from fw_plugins.quantization.grouped import Grouped
from fw_plugins.quantization.weight_only import WeightOnlyConfig, grouped_layout


@dataclass
class QATConfig(WeightOnlyConfig):
    """What weights will be kept as, once they are trained; with the same options `fw quantize --method rtn` makes those codes. In mixed
    precision `fsdp` and `zero` show layers weights of 16 bits, so that some codes are the next ones there."""

    bits: Literal[4, 8] = 4
    """Of a code. No effect on memory while training."""


class QAT(QuantizationPlugin):
    """Weights train; layers compute with what they will be in 4 or 8 bits (w4a16, w8a16). Takes a rounded weight, a layer at a time."""

    api = 1
    Config = QATConfig
    config: QATConfig
    conflicts: ClassVar = (
        Conflicts(
            "peft",
            ("lora", "dora", "ia3", "adapter", "prompt", "prefix", "hf_peft"),
            "qat trains the weights that are rounded, which are frozen beside adapters; use peft=none, or quantization=w4a16",
        ),
        Conflicts("precision", ("fp8",), "its products would be of weights rounded twice; use precision=bf16"),
    )
    whole_layers_because = "a group of weights that shares a scale would be cut"

    def apply(self, model: CausalLM, compute: torch.dtype) -> Mapping[str, Quantized]:
        """No weight is kept as codes yet."""
        chosen = [(n, m) for n, m in linears(model) if not any(fnmatchcase(n, pattern) for pattern in self.config.skip)]
        if not chosen:
            raise UserError("quantization.skip: no linear layer is left; use quantization=none")
        for name, linear in chosen:
            layout = grouped_layout(self.config, self.config.bits, name, (linear.out_features, linear.in_features))
            linear.__class__ = RoundedLinear
            assert isinstance(linear, RoundedLinear)
            linear.layout = layout
        return {}


class RoundedLinear(nn.Linear):
    """``round(W) x + b``, where rounding is to what codes stand for."""

    layout: Grouped

    def forward(self, x_I: Tensor) -> Tensor:
        """``[…, I]`` → ``[…, O]``."""
        device = x_I.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_I.dtype
        out_O: Tensor = _Product.apply(x_I.to(dtype), self.weight, self.layout)
        return out_O if self.bias is None else out_O + self.bias.to(dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_I: Tensor, weight_OI: Tensor, layout: Grouped) -> Tensor:
        ctx.layout = layout
        ctx.save_for_backward(x_I, weight_OI)
        return F.linear(x_I, layout.rounded(weight_OI).to(x_I.dtype))

    @staticmethod
    def backward(ctx: Any, grad_O: Tensor) -> tuple[Tensor | None, ...]:
        x_I, weight_OI = ctx.saved_tensors
        wants_x, wants_weight, _ = ctx.needs_input_grad
        grad_weight_OI = (grad_O.flatten(0, -2).T @ x_I.flatten(0, -2)).to(weight_OI.dtype) if wants_weight else None
        grad_I = grad_O @ ctx.layout.rounded(weight_OI).to(grad_O.dtype) if wants_x else None
        return grad_I, grad_weight_OI, None
