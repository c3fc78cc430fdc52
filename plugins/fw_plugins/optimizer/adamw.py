"""AdamW from torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fw.api import OptimizerOptions, OptimizerPlugin, OptimizerSpec, UserError
from fw.api.kernels import adamw as kernel
from fw_plugins.optimizer.per_parameter import evaluated, local


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
    """One kernel per step instead of many: no temporary copies. Empty for wherever the device has it; on the CPU for fw's own."""


class AdamWUpdate(torch.optim.AdamW):
    """torch's, where fw's kernel updates what is on the CPU: a pass over each parameter in which gradients are clipped as well.

    State is torch's own. What the kernel does not take, torch's update does.
    """

    reads_narrow_gradients = True
    """Those of parameters in fp32 may be in bfloat16."""
    grad_factor: Tensor | None = None
    """What gradients of the next step are multiplied by."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = evaluated(closure)
        factor, self.grad_factor = self.grad_factor, None
        gathered = [(group, *self._gathered(group)) for group in self.param_groups]
        plain = not any(group["amsgrad"] or group["maximize"] for group in self.param_groups)
        if plain and all(kernel.takes(*alike) for _, lists, _ in gathered for alike in zip(*lists, strict=True)):
            for group, lists, steps in gathered:
                if steps:
                    options = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
                    kernel.update(lists[0], lists[1], lists[2], lists[3], steps, factor=factor, **options)
            return loss
        self._widen()
        gathered = [(group, *self._gathered(group)) for group in self.param_groups]
        if factor is not None:
            torch._foreach_mul_([grad for _, lists, _ in gathered for grad in lists[1]], factor)
        super().step()
        return loss

    def _widen(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
                    wide = parameter.grad.to(parameter.dtype)
                    parameter.grad = None
                    parameter.grad_dtype = parameter.dtype
                    parameter.grad = wide

    def _gathered(self, group: dict[str, Any]) -> tuple[list[list[Tensor]], list[Tensor]]:
        """Parameters, gradients and both moments, of each what this rank has; and how many steps each has made."""
        lists: list[list[Tensor]] = [[], [], [], []]
        steps: list[Tensor] = []
        self._init_group(group, lists[0], lists[1], lists[2], lists[3], [], steps)
        return [[local(tensor) for tensor in of] for of in lists], steps


class AdamW(OptimizerPlugin):
    """Adam with decoupled weight decay (https://arxiv.org/abs/1711.05101): 8 bytes of state per fp32 parameter."""

    api = 1
    Config = AdamWConfig
    config: AdamWConfig

    def spec(self, device: torch.device) -> OptimizerSpec:
        """torch's AdamW, fused on cpu and cuda; on the CPU by fw's kernel, where it is there."""
        c = self.config
        fused = device.type in ("cpu", "cuda") if c.fused is None else c.fused
        arguments = {"betas": tuple(c.betas), "eps": c.eps, "fused": fused}
        cls = AdamWUpdate if c.fused is None and device.type == "cpu" and kernel.available() else torch.optim.AdamW
        return OptimizerSpec(cls, c.lr, c.weight_decay, arguments, in_backward=c.in_backward)
