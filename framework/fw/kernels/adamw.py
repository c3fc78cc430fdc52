"""AdamW on the CPU, clipping included, in one pass over memory."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fw.kernels.calls import Kernel
from fw.kernels.of_cpu import DTYPES, of_cpu, wanted

_UPDATE = Kernel("fw_adamw", [ctypes.c_void_p] * 4 + [ctypes.c_long] * 3 + [ctypes.c_float] * 7)


def available() -> bool:
    """Whether there is such a kernel on this machine."""
    return wanted() and _UPDATE.available


def takes(*alike: Tensor) -> bool:
    """Whether :func:`update` changes a parameter with its gradient, which may be in bfloat16, and its moments, which are these."""
    first, grad, *_ = alike
    same = all(x.shape == first.shape and x.stride() == first.stride() and x.dtype == first.dtype for x in alike if x is not grad)
    same = same and grad.shape == first.shape and grad.stride() == first.stride() and grad.dtype in (first.dtype, torch.bfloat16)
    return same and first.dtype in DTYPES and torch.ops.aten.is_non_overlapping_and_dense(first) and of_cpu(*alike) and _UPDATE.available


def update(
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    factor: Tensor | None,
) -> None:
    """A step of AdamW (https://arxiv.org/abs/1711.05101) by ``grads · factor``, in place: computed in fp32, rounded once.

    Args:
        steps: a scalar for each, which steps are before this one; one more afterwards.
    """
    given = list(parameters), list(grads), list(means), list(squares), list(steps)
    torch.ops.fw.adamw(*given, factor, lr, *betas, eps, weight_decay)


@torch.library.custom_op("fw::adamw", mutates_args=("parameters", "means", "squares", "steps"))
def _update(
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[Tensor],
    factor: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    by = 1.0 if factor is None else factor.item()
    for p, g, m, v, steps_before in zip(parameters, grads, means, squares, steps, strict=True):
        steps_before += 1
        step = steps_before.item()
        root, rate = math.sqrt(1 - beta2**step), lr / (1 - beta1**step)
        given = *(x.data_ptr() for x in (p, g, m, v)), *(x.dtype == torch.bfloat16 for x in (p, g)), p.numel()
        _UPDATE(*given, by, 1 - lr * weight_decay, 1 - beta1, beta2, eps, rate, root)


@_update.register_fake
def _(*_: object) -> None:
    return None
