"""LAMB (You et al. 2020, https://arxiv.org/abs/1904.00962)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fw.api import OptimizerPlugin, OptimizerSpec, UserError
from fw_plugins.optimizer.adamw import MomentsConfig
from fw_plugins.optimizer.divided import norm
from fw_plugins.optimizer.per_parameter import PerParameter, local


class LambUpdate(PerParameter):
    """Adam's direction plus decay, ``u = m̂ / (√v̂ + ε) + λ w``, made as long as the weights: ``w ← w - lr · (‖w‖ / ‖u‖) u``.

    Norms are of whole parameters. The ratio is 1 where a norm is 0, and for parameters that do not decay (norms, biases, embeddings), which
    the paper's authors leave out too; ``largest_ratio`` bounds it.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        largest_ratio: float = 10.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "largest_ratio": largest_ratio})

    def first_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Moments of zero."""
        return {"step": torch.zeros(()), "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}

    def update(self, parameter: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """As the formula says. Collective for parameters that are divided."""
        (beta1, beta2), lr = group["betas"], group["lr"]
        state["step"] += 1
        step = int(state["step"])
        weight, grad = local(parameter), local(grad).to(parameter.dtype)
        first, second = local(state["exp_avg"]), local(state["exp_avg_sq"])
        first.lerp_(grad, 1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = second.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
        change = (first / (1 - beta1**step)).div_(root).add_(weight, alpha=group["weight_decay"])
        ratio = torch.ones((), device=weight.device)
        if group["weight_decay"]:
            lengths = norm(weight, parameter), norm(change, parameter)
            ratio = torch.where((lengths[0] > 0) & (lengths[1] > 0), lengths[0] / lengths[1], ratio).clamp(max=group["largest_ratio"])
        weight.sub_(change.mul_(lr * ratio))


@dataclass
class LambConfig(MomentsConfig):
    """LAMB keeps two moments per parameter, in the parameter's dtype."""

    lr: float = 1e-3
    """Peak learning rate, in units of the weights' own length; the schedule multiplies it."""
    eps: float = 1e-6
    """Added to the root of the second moment."""
    largest_ratio: float = 10.0
    """Bound on the ratio of the weights' length to the update's. No effect on memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.largest_ratio <= 0:
            raise UserError("optimizer.largest_ratio must be above 0")


class Lamb(OptimizerPlugin):
    """Adam with a step as long as each layer's weights allow (https://arxiv.org/abs/1904.00962), for very large batches: AdamW's bytes."""

    api = 1
    Config = LambConfig
    config: LambConfig

    def spec(self, device: torch.device) -> OptimizerSpec:
        """fw's own, for any device and for sharded parameters."""
        c = self.config
        arguments = {"betas": tuple(c.betas), "eps": c.eps, "largest_ratio": c.largest_ratio}
        return OptimizerSpec(LambUpdate, c.lr, c.weight_decay, arguments, state="whole", in_backward=c.in_backward)
