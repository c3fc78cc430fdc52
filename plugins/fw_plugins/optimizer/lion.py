"""Lion (Chen et al. 2023, https://arxiv.org/abs/2302.06675)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fw.api import OptimizerOptions, OptimizerPlugin, OptimizerSpec, UserError
from fw_plugins.optimizer.per_parameter import PerParameter


class LionUpdate(PerParameter):
    """``w ← (1 - lr·λ) w - lr · sign(β₁ m + (1 - β₁) g)``, then ``m ← β₂ m + (1 - β₂) g``; parameter by parameter, so that no more than
    one parameter's bytes are temporary. Gradients may have another dtype than parameters; the momentum has the parameter's."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def first_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """No momentum."""
        return {"exp_avg": torch.zeros_like(parameter)}

    def update(self, parameter: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """As the formula says."""
        lr, (beta1, beta2) = group["lr"], group["betas"]
        momentum, grad = state["exp_avg"], grad.to(parameter.dtype)
        direction = momentum.lerp(grad, 1 - beta1).sign_()
        parameter.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
        momentum.lerp_(grad, 1 - beta2)


@dataclass
class LionConfig(OptimizerOptions):
    """Lion keeps one momentum per parameter, in the parameter's dtype, and moves every weight by the learning rate."""

    lr: float = 1e-4
    """Peak learning rate; 3 to 10 times below AdamW's. The schedule multiplies it."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])
    """Weight of the momentum in the direction, and its decay."""
    weight_decay: float = 1.0
    """Decoupled decay per unit of learning rate, 3 to 10 times above AdamW's; norms, biases and embeddings are left alone."""

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise UserError(f"optimizer.betas: {self.betas} are not two numbers in [0, 1)")
        if self.lr < 0 or self.weight_decay < 0:
            raise UserError("optimizer.lr and weight_decay must not be negative")


class Lion(OptimizerPlugin):
    """The sign of a momentum (https://arxiv.org/abs/2302.06675): 4 bytes of state per fp32 parameter, half of AdamW's."""

    api = 1
    Config = LionConfig
    config: LionConfig

    def spec(self, device: torch.device) -> OptimizerSpec:
        """fw's own, for any device and for sharded parameters."""
        c = self.config
        return OptimizerSpec(LionUpdate, c.lr, c.weight_decay, {"betas": tuple(c.betas)}, in_backward=c.in_backward)
