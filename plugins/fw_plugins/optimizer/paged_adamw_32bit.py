"""AdamW with its moments in pages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from fw.api import Conflicts, OffloadPolicy, OptimizerPlugin, OptimizerSpec
from fw.api.kernels import adamw as kernel
from fw_plugins.optimizer import paged
from fw_plugins.optimizer.adamw import MomentsConfig
from fw_plugins.optimizer.per_parameter import PerParameter, local


class AdamWUpdate(PerParameter):
    """AdamW, one kernel per parameter: all at once would want all pages at once."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": True}
        super().__init__(params, defaults)

    def first_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Two moments in the parameter's dtype."""
        moments = {key: torch.zeros_like(parameter, requires_grad=False) for key in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros((), dtype=torch.float32, device=parameter.device), **moments}

    def update(self, parameter: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """By fw's kernel on the CPU, else by torch's fused one."""
        p, g, m, v = (local(x) for x in (parameter, grad, state["exp_avg"], state["exp_avg_sq"]))
        beta1, beta2 = group["betas"]
        lr, weight_decay, eps = group["lr"], group["weight_decay"], group["eps"]
        if kernel.takes(p, g, m, v):
            betas = beta1, beta2
            kernel.update([p], [g], [m], [v], [state["step"]], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, factor=None)
            return
        adamw(
            [p],
            [g],
            [m],
            [v],
            [],
            [state["step"]],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
        )


class PagedAdamW32bitUpdate(paged.Paged, AdamWUpdate):
    """The update of ``adamw``."""


class PagedAdamW32bit(OptimizerPlugin):
    """adamw with its state in pages, which leave a full GPU for host memory (https://arxiv.org/abs/2305.14314)."""

    api = 1
    Config = MomentsConfig
    config: MomentsConfig
    conflicts: ClassVar[tuple[Conflicts, ...]] = (
        Conflicts("sharding", ("zero",), "DeepSpeed places optimizer state itself; use optimizer=adamw with its offload, or sharding=fsdp"),
    )

    def check(self, device_type: str, offload: OffloadPolicy) -> None:
        """Pages need bitsandbytes, and state that is on the device."""
        paged.check("paged_adamw_32bit", "adamw", device_type, offload)

    def spec(self, device: torch.device) -> OptimizerSpec:
        """fw's own, by the kernels of ``adamw``."""
        c = self.config
        said = paged.note("paged_adamw_32bit", "adamw", device)
        arguments = {"betas": tuple(c.betas), "eps": c.eps}
        return OptimizerSpec(PagedAdamW32bitUpdate, c.lr, c.weight_decay, arguments, in_backward=c.in_backward, note=said)
