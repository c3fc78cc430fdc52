"""Lion with its momentum in 8 bits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fw.api import OptimizerPlugin, OptimizerSpec
from fw_plugins.optimizer.eight_bit import EightBit
from fw_plugins.optimizer.lion import LionConfig


class Lion8bitUpdate(EightBit):
    """Lion (https://arxiv.org/abs/2302.06675), of a momentum that was quantized after the last step."""

    moments: ClassVar[dict[str, bool]] = {"exp_avg": True}

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def formula(self, weight: Tensor, grad: Tensor, kept: dict[str, Tensor], step: int, group: dict[str, Any]) -> None:
        """Lion's."""
        (beta1, beta2), lr = group["betas"], group["lr"]
        direction = kept["exp_avg"].lerp(grad, 1 - beta1).sign_()
        weight.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
        kept["exp_avg"].lerp_(grad, 1 - beta2)


@dataclass
class Lion8bitConfig(LionConfig):
    """One momentum per parameter, of one byte and a little; those of norms and biases in fp32."""


class Lion8bit(OptimizerPlugin):
    """Lion with its momentum in 8 bits (https://arxiv.org/abs/2110.02861): 1.02 bytes of state per parameter."""

    api = 1
    Config = Lion8bitConfig
    config: Lion8bitConfig

    def spec(self, device: torch.device) -> OptimizerSpec:
        """fw's own, for any device and for parameters that are divided by rows."""
        c = self.config
        return OptimizerSpec(Lion8bitUpdate, c.lr, c.weight_decay, {"betas": tuple(c.betas)}, state="rows", in_backward=c.in_backward)
