"""Linear layers whose weight is frozen beside a change of low rank that trains, ``W x + s · B A x``, on processors with AMX.

What the change takes is one pass over what goes in and what comes out, forward, and two, backward, instead of a product each; its factors
are read in the dtype they are kept in, and the gradients of both parts come in one tensor.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fw.kernels import matrix
from fw.kernels.calls import Kernel
from fw.kernels.of_cpu import DTYPES, of_cpu
from fw.kernels.twice import by_torch

_FORWARD = Kernel("fw_lowrank_forward", [ctypes.c_void_p])
_BACKWARD = Kernel("fw_lowrank_backward", [ctypes.c_void_p])
_SIDE = 32
"""As in matrix_parts.h: ranks are filled up to a multiple of it."""


class _Change(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("a", "b", "x", "g", "base", "y", "dx", "low", "da", "db")),
        *((name, ctypes.c_long) for name in ("a_half", "b_half", "rows", "inner", "outer", "rank", "adds")),
        ("scale", ctypes.c_float),
    ]


def takes(x_I: Tensor, a_RI: Tensor, b_OR: Tensor, *others: Tensor) -> bool:
    """Whether :func:`changed` and :func:`added` compute these, in bfloat16."""
    if not torch.is_grad_enabled() or not of_cpu(x_I, a_RI, b_OR, *others) or not matrix.available():
        return False
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x_I.dtype
    fitting = all(each.dtype in DTYPES for each in (x_I, a_RI, b_OR)) and a_RI.is_contiguous() and b_OR.is_contiguous()
    return dtype == torch.bfloat16 and fitting and a_RI.requires_grad and b_OR.requires_grad and x_I.numel() > 0


def changed(x_I: Tensor, weight_OI: Tensor, bias_O: Tensor | None, a_RI: Tensor, b_OR: Tensor, scale: float) -> Tensor:
    """``W x + bias + scale · B A x``, ``[…, O]`` in bfloat16; no gradient of W and of the bias.

    W itself is kept for backward, and not the memory it has now, which an engine may take and give again in between.
    """
    bias_O = None if bias_O is None else bias_O.detach()
    found: Tensor = _Changed.apply(x_I.to(torch.bfloat16), weight_OI, bias_O, a_RI, b_OR, scale)
    return found


def added(y_O: Tensor, x_I: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> Tensor:
    """``y + scale · B A x``; y is in bfloat16."""
    found_TO, _ = torch.ops.fw.lowrank_forward(_rows(y_O), _rows(x_I.to(torch.bfloat16)), a_RI, b_OR, scale)
    found: Tensor = found_TO.view(y_O.shape)
    return found


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


class _Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_I: Tensor, weight_OI: Tensor, bias_O: Tensor | None, a_RI: Tensor, b_OR: Tensor, scale: float) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            base_O = F.linear(x_I, weight_OI.to(x_I.dtype), None if bias_O is None else bias_O.to(x_I.dtype))
        y_TO, low_TW = torch.ops.fw.lowrank_forward(_rows(base_O), _rows(x_I), a_RI, b_OR, scale)
        ctx.save_for_backward(x_I, weight_OI, low_TW, a_RI, b_OR)
        ctx.scale = scale
        return y_TO.view(base_O.shape)

    @staticmethod
    def backward(ctx: Any, grad_O: Tensor) -> tuple[Tensor | None, ...]:
        x_I, weight_OI, low_TW, a_RI, b_OR = ctx.saved_tensors
        if torch.is_grad_enabled():

            def compute(x_I: Tensor, a_RI: Tensor, b_OR: Tensor) -> Tensor:
                return F.linear(x_I.float(), weight_OI.float()) + _change_of(x_I, a_RI, b_OR, ctx.scale)

            dx_I, da_RI, db_OR = by_torch(compute, (x_I, a_RI, b_OR), grad_O)
            return dx_I, None, None, da_RI, db_OR, None
        grad_TO = _rows(grad_O)
        dx_TI = grad_TO @ weight_OI.to(grad_TO.dtype) if ctx.needs_input_grad[0] else None
        da_RI, db_OR = torch.ops.fw.lowrank_backward(dx_TI, grad_TO, _rows(x_I), low_TW, a_RI, b_OR, ctx.scale, True)
        dx_I = None if dx_TI is None else dx_TI.view(x_I.shape)
        return dx_I, None, None, da_RI.to(a_RI.dtype), db_OR.to(b_OR.dtype), None


def _change_of(x_I: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> Tensor:
    return scale * F.linear(F.linear(x_I.float(), a_RI.float()), b_OR.float())


def _wide(rank: int) -> int:
    return -(-rank // _SIDE) * _SIDE


def _change(x_TI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float, adds: bool, **places: Tensor | None) -> _Change:
    rows, inner = x_TI.shape
    outer, rank = b_OR.shape
    of = _Change(rows=rows, inner=inner, outer=outer, rank=rank, scale=scale, adds=adds)
    of.a_half, of.b_half = a_RI.dtype == torch.bfloat16, b_OR.dtype == torch.bfloat16
    for name, tensor in {"a": a_RI, "b": b_OR, "x": x_TI, **places}.items():
        setattr(of, name, None if tensor is None else tensor.data_ptr())
    return of


@torch.library.custom_op("fw::lowrank_forward", mutates_args=())
def _forward(base_TO: Tensor, x_TI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    y_TO, low_TW = _forward_room(base_TO, x_TI, a_RI, b_OR, scale)
    of = _change(x_TI, a_RI, b_OR, scale, True, base=base_TO, y=y_TO, low=low_TW)
    _FORWARD(ctypes.addressof(of))
    return y_TO, low_TW


@_forward.register_fake
def _forward_room(base_TO: Tensor, x_TI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(base_TO), x_TI.new_empty((x_TI.shape[0], _wide(a_RI.shape[0])))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, x_TI, a_RI, b_OR, ctx.scale = inputs
    ctx.save_for_backward(x_TI, output[1], a_RI, b_OR)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad_TO: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    x_TI, low_TW, a_RI, b_OR = ctx.saved_tensors
    if torch.is_grad_enabled():
        return grad_TO, *by_torch(lambda x, a, b: _change_of(x, a, b, ctx.scale), (x_TI, a_RI, b_OR), grad_TO), None
    wants_x = ctx.needs_input_grad[1]
    dx_TI, da_RI, db_OR = torch.ops.fw.lowrank_gradients(grad_TO.contiguous(), x_TI, low_TW, a_RI, b_OR, ctx.scale, wants_x)
    return grad_TO, dx_TI if wants_x else None, da_RI.to(a_RI.dtype), db_OR.to(b_OR.dtype), None


_forward.register_autograd(_gradients, setup_context=_keep)


@torch.library.custom_op("fw::lowrank_gradients", mutates_args=())
def _gradients_alone(
    grad_TO: Tensor, x_TI: Tensor, low_TW: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float, wants_x: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx_TI, da_RI, db_OR = _gradients_room(grad_TO, x_TI, low_TW, a_RI, b_OR, scale, wants_x)
    places = {"g": grad_TO, "dx": dx_TI if wants_x else None, "low": low_TW, "da": da_RI, "db": db_OR}
    of = _change(x_TI, a_RI, b_OR, scale, False, **places)
    _BACKWARD(ctypes.addressof(of))
    return dx_TI, da_RI, db_OR


@_gradients_alone.register_fake
def _gradients_room(
    grad_TO: Tensor, x_TI: Tensor, low_TW: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float, wants_x: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx_TI = torch.empty_like(x_TI) if wants_x else x_TI.new_empty(0)
    return dx_TI, a_RI.new_empty(a_RI.shape, dtype=torch.float32), b_OR.new_empty(b_OR.shape, dtype=torch.float32)


@torch.library.custom_op("fw::lowrank_backward", mutates_args=("dx_TI",))
def _backward(
    dx_TI: Tensor | None, grad_TO: Tensor, x_TI: Tensor, low_TW: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float, adds: bool
) -> tuple[Tensor, Tensor]:
    da_RI, db_OR = _backward_room(dx_TI, grad_TO, x_TI, low_TW, a_RI, b_OR, scale, adds)
    of = _change(x_TI, a_RI, b_OR, scale, adds, g=grad_TO, dx=dx_TI, low=low_TW, da=da_RI, db=db_OR)
    _BACKWARD(ctypes.addressof(of))
    return da_RI, db_OR


@_backward.register_fake
def _backward_room(
    dx_TI: Tensor | None, grad_TO: Tensor, x_TI: Tensor, low_TW: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float, adds: bool
) -> tuple[Tensor, Tensor]:
    return a_RI.new_empty(a_RI.shape, dtype=torch.float32), b_OR.new_empty(b_OR.shape, dtype=torch.float32)


@register_flop_formula(torch.ops.fw.lowrank_forward)
def _forward_flops(y: Any, x: Any, a: Any, b: Any, *_: Any, **__: Any) -> int:
    return int(2 * x[0] * a[0] * (a[1] + b[0]))


@register_flop_formula(torch.ops.fw.lowrank_gradients)
def _gradients_flops(grad: Any, x: Any, low: Any, a: Any, b: Any, scale: float, wants_x: bool, *_: Any, **__: Any) -> int:
    return int(2 * x[0] * a[0] * (2 * b[0] + a[1] * (2 if wants_x else 1)))


@register_flop_formula(torch.ops.fw.lowrank_backward)
def _backward_flops(dx: Any, grad: Any, x: Any, low: Any, a: Any, b: Any, *_: Any, **__: Any) -> int:
    return int(2 * x[0] * a[0] * (2 * b[0] + a[1] * (1 if dx is None else 2)))
