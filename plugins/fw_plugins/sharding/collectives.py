"""torch's functional collectives that have a gradient, under their names before and after torch 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def _named(*names: str) -> Callable[..., Tensor]:
    found: Callable[..., Tensor] = next(getattr(functional, name) for name in names if hasattr(functional, name))
    return found


_all_gather_plain = _named("all_gather_single", "all_gather_tensor")
_all_gather = _named("all_gather_single_autograd", "all_gather_tensor_autograd")
_reduce_scatter = _named("reduce_scatter_single_autograd", "reduce_scatter_tensor_autograd")


def all_gather(x: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """The ranks' tensors one after another along ``dim``; the gradients of all ranks are summed and scattered back."""
    return (_all_gather if x.is_floating_point() else _all_gather_plain)(x.contiguous(), dim, mesh)


def reduce_scatter(x: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """The sum over ranks, cut along ``dim``; the gradient is gathered."""
    return _waited(_reduce_scatter(x.contiguous(), "sum", dim, mesh))


def _waited(x: Tensor) -> Tensor:
    """A plain tensor. One that is still under way has no gradient once it enters a compiled block (torch 2.13)."""
    return _Wait.apply(x) if isinstance(x, functional.AsyncCollectiveTensor) else x


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        waited: Tensor = x.wait()  # type: ignore[attr-defined]
        return waited

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def all_reduce(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum over ranks, on all of them; so is the gradient."""
    summed: Tensor = _AllReduce.apply(x, mesh)
    return summed


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        summed = x.clone()
        dist.all_reduce(summed, group=mesh.get_group())
        return summed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        summed = grad.clone()
        dist.all_reduce(summed, group=ctx.mesh.get_group())
        return summed, None


def exchange(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Slice r of the first dimension goes to rank r; slice r of the result has come from it. The gradient goes back the same way."""
    return functional.all_to_all_single_autograd(x.contiguous(), None, None, mesh)
