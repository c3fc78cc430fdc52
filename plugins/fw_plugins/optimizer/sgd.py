"""Stochastic gradient descent from torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fw.api import OptimizerOptions, OptimizerPlugin, OptimizerSpec, UserError


@dataclass
class SGDConfig(OptimizerOptions):
    """SGD keeps one momentum per parameter, or nothing."""

    lr: float = 0.1
    """Peak learning rate; the schedule multiplies it."""
    momentum: float = 0.0
    """Decay of the velocity; above 0 it takes as many bytes as the parameters."""
    weight_decay: float = 0.0
    """L2 penalty; norms, biases and embeddings are left alone."""
    nesterov: bool = False
    """Nesterov's look-ahead; needs momentum."""

    def __post_init__(self) -> None:
        if self.lr < 0 or self.momentum < 0 or self.weight_decay < 0:
            raise UserError("optimizer.lr, momentum and weight_decay must not be negative")
        if self.nesterov and not self.momentum:
            raise UserError("optimizer.nesterov needs optimizer.momentum above 0")


class SGD(OptimizerPlugin):
    """Gradient descent with optional momentum: no state at all without it."""

    api = 1
    Config = SGDConfig
    config: SGDConfig

    def spec(self, device: torch.device) -> OptimizerSpec:
        """torch's SGD."""
        c = self.config
        return OptimizerSpec(
            torch.optim.SGD, c.lr, c.weight_decay, {"momentum": c.momentum, "nesterov": c.nesterov}, in_backward=c.in_backward
        )
