"""AdamW with its moments in pages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from fw.api import Conflicts, OffloadPolicy, OptimizerPlugin, OptimizerSpec
from fw_plugins.optimizer import paged
from fw_plugins.optimizer.adamw import MomentsConfig
from fw_plugins.optimizer.per_parameter import PerParameter, local


class AdamWUpdate(PerParameter):
    """torch's AdamW, one kernel per parameter: all at once would want all pages at once."""

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
        """By the fused kernel."""
        beta1, beta2 = group["betas"]
        adamw(
            [local(parameter)],
            [local(grad)],
            [local(state["exp_avg"])],
            [local(state["exp_avg_sq"])],
            [],
            [state["step"]],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
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
        """fw's own around torch's fused kernel."""
        c = self.config
        said = paged.note("paged_adamw_32bit", "adamw", device)
        arguments = {"betas": tuple(c.betas), "eps": c.eps}
        return OptimizerSpec(PagedAdamW32bitUpdate, c.lr, c.weight_decay, arguments, in_backward=c.in_backward, note=said)
