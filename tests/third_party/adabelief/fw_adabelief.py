"""AdaBelief (Zhuang et al. 2020, https://arxiv.org/abs/2010.07468): steps are long where gradients are as expected."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fw.api import OptimizerOptions, OptimizerPlugin, OptimizerSpec, UserError


@dataclass
class AdaBeliefConfig(OptimizerOptions):
    """Step size, and how long gradients are remembered."""

    lr: float = 1e-3
    """Step size; the schedule multiplies it."""
    beta1: float = 0.9
    """Decay of the mean of gradients, 4 bytes per parameter."""
    beta2: float = 0.999
    """Decay of the squared distance from that mean, 4 bytes per parameter."""
    eps: float = 1e-16
    """Added to that distance in each step, and to its root."""
    weight_decay: float = 0.01
    """Decoupled decay per unit of learning rate."""

    def __post_init__(self) -> None:
        if self.lr < 0 or self.eps <= 0:
            raise UserError("optimizer.lr must not be negative, and optimizer.eps must be above 0")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise UserError("optimizer.beta1 and optimizer.beta2 must be in [0, 1)")


class Update(torch.optim.Optimizer):
    """The paper's algorithm 2, with decoupled decay; all of it element by element."""

    def __init__(self, params, lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                state = self.state[weight]
                if not state:
                    zeros = {"memory_format": torch.preserve_format}
                    state.update(step=torch.zeros(()), mean=torch.zeros_like(weight, **zeros), belief=torch.zeros_like(weight, **zeros))
                state["step"] += 1
                count = float(state["step"])
                state["mean"].lerp_(weight.grad, 1 - beta1)
                off = weight.grad - state["mean"]
                state["belief"].mul_(beta2).addcmul_(off, off, value=1 - beta2).add_(group["eps"])
                width = (state["belief"] / (1 - beta2**count)).sqrt_().add_(group["eps"])
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.addcdiv_(state["mean"], width, value=-group["lr"] / (1 - beta1**count))


class AdaBelief(OptimizerPlugin):
    """AdaBelief: AdamW whose second moment is the distance of gradients from their mean."""

    api = 1
    Config = AdaBeliefConfig

    def spec(self, device: torch.device) -> OptimizerSpec:
        """Two moments of each weight."""
        c = self.config
        return OptimizerSpec(Update, c.lr, c.weight_decay, {"betas": (c.beta1, c.beta2), "eps": c.eps}, in_backward=c.in_backward)
