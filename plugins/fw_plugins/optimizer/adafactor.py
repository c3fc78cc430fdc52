"""Adafactor (Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fw.api import OptimizerOptions, OptimizerPlugin, OptimizerSpec, UserError
from fw_plugins.optimizer.divided import norm, reduced, summed
from fw_plugins.optimizer.per_parameter import PerParameter, local


class AdafactorUpdate(PerParameter):
    """A second moment that is the product of its row and column means, no first moment, and a step in units of the weights' size.

    Algorithm 4 and 5 of the paper, with the defaults of section 9 and decoupled decay, as :class:`torch.optim.Adafactor` has them; that one
    does not know parameters that ranks divide. Means are of whole parameters.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: float = 1e-3,
        clip: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "clip": clip, "weight_decay": weight_decay})

    def first_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Means of zero."""
        state = {"step": torch.zeros(())}
        kept, dims = local(parameter), parameter.dim()
        if dims < 2:
            return {**state, "variance": torch.zeros_like(parameter, dtype=torch.float32)}
        for name, dim in (("row_var", dims - 1), ("col_var", dims - 2)):
            shape = [1 if i == dim else size for i, size in enumerate(kept.shape)]
            state[name] = reduced(kept.new_zeros(shape, dtype=torch.float32), parameter, dim)
        return state

    def update(self, parameter: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """Collective for parameters that are divided."""
        state["step"] += 1
        step = int(state["step"])
        weight, gradient = local(parameter), local(grad).float()
        one_minus_beta2 = step ** group["beta2_decay"]
        tiny = torch.finfo(torch.float32).eps
        if parameter.dim() < 2:
            variance = local(state["variance"]).lerp_(gradient.square(), one_minus_beta2)
            change = gradient * variance.clamp(min=tiny**2).rsqrt_()
        else:
            row, col = local(state["row_var"]), local(state["col_var"])
            square, (last, before) = gradient.square(), (parameter.dim() - 1, parameter.dim() - 2)
            row.lerp_(summed(square.sum(-1, keepdim=True), parameter, [last]) / parameter.shape[-1], one_minus_beta2)
            col.lerp_(summed(square.sum(-2, keepdim=True), parameter, [before]) / parameter.shape[-2], one_minus_beta2)
            mean = summed(row.sum(-2, keepdim=True), parameter, [before]) / parameter.shape[-2]
            variance = (row @ col).div_(mean.clamp_(min=tiny))
            change = variance.clamp_(min=tiny**2).rsqrt_().mul_(gradient)
        count = math.sqrt(parameter.numel())
        size = (norm(weight, parameter) / count).clamp(min=group["eps"])
        spread = norm(change, parameter) / count
        factor = min(group["lr"], 1 / math.sqrt(step)) * size / (spread / group["clip"]).clamp(min=1.0)
        weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(change.mul_(factor).to(weight.dtype))


@dataclass
class AdafactorConfig(OptimizerOptions):
    """Adafactor keeps one number per row and one per column."""

    lr: float = 1e-2
    """Step in units of a parameter's root mean square, at most 1 / √steps; the schedule multiplies it."""
    beta2_decay: float = -0.8
    """The second moment forgets with 1 - step^beta2_decay."""
    eps: float = 1e-3
    """Least root mean square of a parameter that a step is measured by."""
    clip: float = 1.0
    """Largest root mean square of a step before it is scaled."""
    weight_decay: float = 0.0
    """Decoupled decay per unit of learning rate; norms, biases and embeddings are left alone."""

    def __post_init__(self) -> None:
        if self.lr < 0 or self.weight_decay < 0 or self.eps < 0:
            raise UserError("optimizer.lr, eps and weight_decay must not be negative")
        if self.beta2_decay > 0 or self.clip <= 0:
            raise UserError("optimizer.beta2_decay must not be above 0, and optimizer.clip must be")


class Adafactor(OptimizerPlugin):
    """A second moment per row and column instead of per weight (https://arxiv.org/abs/1804.04235): next to no state.

    A step takes 12 bytes per element of the largest parameter besides.
    """

    api = 1
    Config = AdafactorConfig
    config: AdafactorConfig

    def spec(self, device: torch.device) -> OptimizerSpec:
        """fw's own, for any device and for sharded parameters."""
        c = self.config
        arguments = {"beta2_decay": c.beta2_decay, "eps": c.eps, "clip": c.clip}
        return OptimizerSpec(AdafactorUpdate, c.lr, c.weight_decay, arguments, state="whole", in_backward=c.in_backward)
