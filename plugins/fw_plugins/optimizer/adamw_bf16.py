"""AdamW with its moments in bfloat16."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fw.api import OptimizerPlugin, OptimizerSpec
from fw_plugins.optimizer.adamw import MomentsConfig
from fw_plugins.optimizer.per_parameter import PerParameter, local


class AdamWBF16Update(PerParameter):
    """AdamW (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101) computed in fp32, one parameter at a time, of moments kept in
    bfloat16.

    What goes back to bfloat16, moments and parameters alike, is rounded up or down at random so that the mean is right (stochastic
    rounding, Gupta et al. 2015, https://arxiv.org/abs/1502.02551). To the nearest, a second moment with β₂ = 0.999 would never fall: the
    change is less than half a unit in the last place. The random numbers are a function of the step, so that copies of a parameter stay
    equal on all ranks.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def first_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Moments of zero."""
        moments = {name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros(()), **moments}

    def update(self, parameter: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """As AdamW does, of what this rank keeps."""
        (beta1, beta2), lr = group["betas"], group["lr"]
        state["step"] += 1
        step = int(state["step"])
        kept, grad = local(parameter), local(grad).float()
        first, second = local(state["exp_avg"]), local(state["exp_avg_sq"])
        generator = torch.Generator(kept.device).manual_seed(step * 1_000_003 + kept.numel())
        m, v = first.float().lerp_(grad, 1 - beta1), second.float().mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        w = kept.float().mul_(1 - lr * group["weight_decay"])
        w.addcdiv_(m, (v.sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"]), value=-lr / (1 - beta1**step))
        for target, value in ((first, m), (second, v), (kept, w)):
            write(target, value, generator)


def write(target: Tensor, value: Tensor, generator: torch.Generator) -> None:
    """``value``, fp32, into ``target``: as it is, or in bfloat16 one of the two nearest numbers, the nearer the likelier."""
    if target.dtype != torch.bfloat16:
        target.copy_(value)
        return
    bits = value.contiguous().view(torch.int32)
    noise = torch.randint(1 << 16, bits.shape, generator=generator, device=bits.device, dtype=torch.int32)
    # A bfloat16 is the upper half of a float: what carries from the lower half rounds up. Infinities and NaN stay as they are.
    rounded = torch.where(value.isfinite(), (bits + noise) & -(1 << 16), bits).view(torch.float32)
    target.copy_(rounded)


@dataclass
class AdamWBF16Config(MomentsConfig):
    """Two moments per parameter, in bfloat16; a step takes about 24 bytes per element of the largest parameter besides."""


class AdamWBF16(OptimizerPlugin):
    """AdamW with moments in bfloat16 and stochastic rounding: 4 bytes of state per parameter, half of AdamW's in fp32.

    With `precision: bf16_true` the weights are rounded so too, and small updates are not lost: 6 bytes per parameter in all.
    """

    api = 1
    Config = AdamWBF16Config
    config: AdamWBF16Config

    def spec(self, device: torch.device) -> OptimizerSpec:
        """fw's own, for any device and for sharded parameters."""
        c = self.config
        return OptimizerSpec(AdamWBF16Update, c.lr, c.weight_decay, {"betas": tuple(c.betas), "eps": c.eps}, in_backward=c.in_backward)
