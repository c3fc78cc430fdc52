"""AdamW with its moments in 8 bits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fw.api import OptimizerPlugin, OptimizerSpec
from fw_plugins.optimizer.adamw import MomentsConfig
from fw_plugins.optimizer.eight_bit import EightBit


class AdamW8bitUpdate(EightBit):
    """AdamW (https://arxiv.org/abs/1711.05101), of moments that were quantized after the last step."""

    moments: ClassVar[dict[str, bool]] = {"exp_avg": True, "exp_avg_sq": False}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def formula(self, weight: Tensor, grad: Tensor, kept: dict[str, Tensor], step: int, group: dict[str, Any]) -> None:
        """AdamW's."""
        (beta1, beta2), lr = group["betas"], group["lr"]
        first, second = kept["exp_avg"], kept["exp_avg_sq"]
        first.lerp_(grad, 1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = second.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
        weight.mul_(1 - lr * group["weight_decay"]).addcdiv_(first, root, value=-lr / (1 - beta1**step))


@dataclass
class AdamW8bitConfig(MomentsConfig):
    """Two moments per parameter, of one byte and a little each; those of norms and biases in fp32."""


class AdamW8bit(OptimizerPlugin):
    """AdamW with moments in 8 bits (https://arxiv.org/abs/2110.02861): 2.03 bytes of state per parameter, a quarter of AdamW's in fp32."""

    api = 1
    Config = AdamW8bitConfig
    config: AdamW8bitConfig

    def spec(self, device: torch.device) -> OptimizerSpec:
        """fw's own, for any device and for parameters that are divided by rows."""
        c = self.config
        return OptimizerSpec(
            AdamW8bitUpdate, c.lr, c.weight_decay, {"betas": tuple(c.betas), "eps": c.eps}, state="rows", in_backward=c.in_backward
        )
