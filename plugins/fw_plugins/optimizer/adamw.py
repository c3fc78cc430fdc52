"""AdamW from torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fw.api import OptimizerOptions, OptimizerPlugin, OptimizerSpec, UserError


@dataclass
class MomentsConfig(OptimizerOptions):
    """What every Adam has."""

    lr: float = 3e-4
    """Peak learning rate; the schedule multiplies it."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay of the first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay per unit of learning rate; norms, biases and embeddings are left alone."""

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise UserError(f"optimizer.betas: {self.betas} are not two numbers in [0, 1)")
        if self.lr < 0 or self.eps < 0 or self.weight_decay < 0:
            raise UserError("optimizer.lr, eps and weight_decay must not be negative")


@dataclass
class AdamWConfig(MomentsConfig):
    """AdamW keeps two moments per parameter, in the parameter's dtype."""

    fused: bool | None = None
    """One kernel per step instead of many: no temporary copies. Empty for wherever the device has it."""


class AdamW(OptimizerPlugin):
    """Adam with decoupled weight decay (https://arxiv.org/abs/1711.05101): 8 bytes of state per fp32 parameter."""

    api = 1
    Config = AdamWConfig
    config: AdamWConfig

    def spec(self, device: torch.device) -> OptimizerSpec:
        """torch's AdamW, fused on cpu and cuda."""
        c = self.config
        fused = device.type in ("cpu", "cuda") if c.fused is None else c.fused
        arguments = {"betas": tuple(c.betas), "eps": c.eps, "fused": fused}
        return OptimizerSpec(torch.optim.AdamW, c.lr, c.weight_decay, arguments, in_backward=c.in_backward)
