"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) for the matrices of blocks, AdamW for the rest."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fw.api import OptimizerPlugin, OptimizerSpec, UserError, local_part
from fw_plugins.optimizer.adamw import MomentsConfig
from fw_plugins.optimizer.per_parameter import PerParameter, local

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_LEAST_NORM = 1e-7


def orthogonalized(matrix: Tensor, steps: int) -> Tensor:
    """About ``U V^T`` of ``matrix = U S V^T``, in bfloat16: singular values come out between 0.7 and 1.2.

    ``steps`` of Newton and Schulz's iteration with Jordan's quintic polynomial. Leading dimensions are a batch (experts).
    """
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.bfloat16().reshape(-1, *matrix.shape[-2:])
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_LEAST_NORM)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)  # rounds each sum once
    return (x.mT if tall else x).reshape(matrix.shape)


class MuonUpdate(PerParameter):
    """``m ← lerp(m, g, 1 - μ)``, ``w ← (1 - lr·λ) w - lr · 0.2 √max(R, C) · orthogonalized(lerp(g, m, μ))`` for matrices.

    The factor gives an update the root mean square of AdamW's (Liu et al. 2025, https://arxiv.org/abs/2502.16982), so that one learning
    rate serves both. A matrix that is divided is put together on each rank, which all compute its update and keep their part.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.95,
        steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "steps": steps, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "matrix": False})

    def first_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Moments of zero: one of a matrix, two of the rest."""
        if group["matrix"]:
            return {"momentum": torch.zeros_like(parameter)}
        return {"step": torch.zeros(()), "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}

    def update(self, parameter: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """Collective for matrices that are divided."""
        weight, gradient = local(parameter), local(grad).to(parameter.dtype)
        lr = group["lr"]
        weight.mul_(1 - lr * group["weight_decay"])
        if group["matrix"]:
            kept = local(state["momentum"]).lerp_(gradient, 1 - group["momentum"])
            change = _of_whole(parameter, gradient.lerp(kept, group["momentum"]), group["steps"])
            weight.sub_(change.to(weight.dtype), alpha=lr * 0.2 * math.sqrt(max(parameter.shape[-2:])))
            return
        beta1, beta2 = group["betas"]
        state["step"] += 1
        step = int(state["step"])
        first, second = local(state["exp_avg"]).lerp_(gradient, 1 - beta1), local(state["exp_avg_sq"])
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = second.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
        weight.addcdiv_(first, root, value=-lr / (1 - beta1**step))


def _of_whole(parameter: Tensor, kept: Tensor, steps: int) -> Tensor:
    """This rank's part of the orthogonalized whole."""
    if not isinstance(parameter, DTensor):
        return orthogonalized(kept, steps)
    mesh, placements = parameter.device_mesh, parameter.placements
    divided = DTensor.from_local(kept, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())
    _, where = local_part(parameter)
    return orthogonalized(divided.full_tensor(), steps)[where]


@dataclass
class MuonConfig(MomentsConfig):
    """One momentum per parameter of the blocks' matrices; two for embeddings, head, norms and biases, which AdamW updates."""

    momentum: float = 0.95
    """Decay of a matrix's momentum."""
    steps: int = 5
    """Newton-Schulz iterations: each takes about as many FLOPs per weight as the matrix's shorter side has rows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1 or self.steps < 1:
            raise UserError("optimizer.momentum must be in [0, 1) and optimizer.steps at least 1")


class Muon(OptimizerPlugin):
    """Orthogonal updates of the blocks' matrices (https://kellerjordan.github.io/posts/muon/), AdamW for the rest.

    About 4 bytes of state per fp32 parameter. A step takes 14 bytes per element of the largest matrix besides, of all of it on each rank.
    """

    api = 1
    Config = MuonConfig
    config: MuonConfig

    def spec(self, device: torch.device) -> OptimizerSpec:
        """fw's own, for any device and for sharded parameters."""
        c = self.config
        arguments = {"betas": tuple(c.betas), "eps": c.eps, "momentum": c.momentum, "steps": c.steps}
        return OptimizerSpec(MuonUpdate, c.lr, c.weight_decay, arguments, state="whole", in_backward=c.in_backward, matrices=True)
