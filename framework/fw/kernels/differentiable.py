"""Norms, rotation and gates of a model that trains on the CPU, in one pass over memory each: operators of torch's, with gradients.

What backward needs is what went in, and of a norm a number for each row; one whose gradients are to be differentiated again
(``create_graph=True``) computes by torch's operators. Each gives None where it does not apply: in generation, which has
its own, within ``torch.compile``, which fuses by itself, on other devices and dtypes, or without a compiler.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fw.kernels.calls import Kernel
from fw.kernels.of_cpu import DTYPES, of_cpu
from fw.kernels.twice import by_torch

_LANES = 16
_PIECE = 1 << 15
"""As in gradients.cpp: numbers that a thread takes at once."""
_NORM = Kernel("fw_norm_forward", [ctypes.c_void_p] * 4 + [ctypes.c_long] * 5 + [ctypes.c_float] * 2)
_NORM_BACK = Kernel("fw_norm_backward", [ctypes.c_void_p] * 6 + [ctypes.c_long] * 5 + [ctypes.c_float])
_TURN = Kernel("fw_turn", [ctypes.c_void_p] * 4 + [ctypes.c_long] * 6)
_GATE = Kernel("fw_gate_forward", [ctypes.c_void_p] * 3 + [ctypes.c_long] * 2)
_GATE_BACK = Kernel("fw_gate_backward", [ctypes.c_void_p] * 5 + [ctypes.c_long] * 2)


def applies(*tensors: Tensor) -> bool:
    """Whether these are what the operators take, here or in what is planned."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not of_cpu(*tensors):
        return False
    return all(x.dtype in DTYPES and x.numel() for x in tensors) and _NORM.available


def _half(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16


def rms_norm(x_D: Tensor, weight_D: Tensor, eps: float, *, shifted: bool = False) -> Tensor | None:
    """``x / sqrt(mean(x²) + eps) · weight`` over the last dimension, ``1 + weight`` where shifted; ``[…, D]``.

    In the dtype that autocast has products in, where it is on, since products are what follows; else in that of x.
    """
    whole = x_D.is_contiguous() and weight_D.is_contiguous() and weight_D.shape == x_D.shape[-1:]
    if not whole or not applies(x_D, weight_D) or x_D.shape[-1] % _LANES:
        return None
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") and x_D.dtype == torch.float32 else x_D.dtype
    if dtype not in DTYPES:
        return None
    y_D, _ = torch.ops.fw.rms_norm(x_D, weight_D, eps, shifted, dtype == torch.bfloat16)
    found: Tensor = y_D
    return found


def rotate(x_BNLH: Tensor, cos_B1LH: Tensor, sin_B1LH: Tensor) -> Tensor | None:
    """Pairs ``(x_i, x_{i+H/2})`` turned; of heads that lie side by side, as projections write them."""
    if not applies(x_BNLH, cos_B1LH, sin_B1LH) or cos_B1LH.dtype != torch.float32 or x_BNLH.shape[-1] % (2 * _LANES):
        return None
    x_BLNH = x_BNLH.transpose(1, 2)
    batch, length, _, size = x_BLNH.shape
    whole = cos_B1LH.shape in ((batch, 1, length, size), (1, 1, length, size)) and sin_B1LH.shape == cos_B1LH.shape
    if not whole or not (x_BLNH.is_contiguous() and cos_B1LH.is_contiguous() and sin_B1LH.is_contiguous()):
        return None
    found: Tensor = torch.ops.fw.rotate(x_BLNH, cos_B1LH, sin_B1LH, False).transpose(1, 2)
    return found


def silu_mul(gate: Tensor, up: Tensor) -> Tensor | None:
    """``silu(gate) · up``."""
    if not applies(gate, up) or gate.shape != up.shape or gate.dtype != up.dtype or gate.numel() % _LANES:
        return None
    if not (gate.is_contiguous() and up.is_contiguous()):
        return None
    found: Tensor = torch.ops.fw.silu_mul(gate, up)
    return found


@torch.library.custom_op("fw::rms_norm", mutates_args=())
def _norm(x_D: Tensor, weight_D: Tensor, eps: float, shifted: bool, half: bool) -> tuple[Tensor, Tensor]:
    y_D, scales = _norm_room(x_D, weight_D, eps, shifted, half)
    size = x_D.shape[-1]
    kinds = (_half(x_D), _half(weight_D), half)
    given = (x_D.data_ptr(), weight_D.data_ptr(), y_D.data_ptr(), scales.data_ptr())
    _NORM(*given, *kinds, x_D.numel() // size, size, eps, float(shifted))
    return y_D, scales


@_norm.register_fake
def _norm_room(x_D: Tensor, weight_D: Tensor, eps: float, shifted: bool, half: bool) -> tuple[Tensor, Tensor]:
    y_D = torch.empty_like(x_D, dtype=torch.bfloat16 if half else torch.float32)
    return y_D, x_D.new_empty(x_D.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("fw::rms_norm_backward", mutates_args=())
def _norm_back(grad_D: Tensor, x_D: Tensor, weight_D: Tensor, scales: Tensor, shifted: bool) -> tuple[Tensor, Tensor]:
    dx_D, sums_PD = _norm_back_room(grad_D, x_D, weight_D, scales, shifted)
    size = x_D.shape[-1]
    given = (grad_D, x_D, weight_D, scales, dx_D, sums_PD)
    kinds = (_half(x_D), _half(weight_D), _half(grad_D))
    _NORM_BACK(*(x.data_ptr() for x in given), *kinds, x_D.numel() // size, size, float(shifted))
    return dx_D, sums_PD


@_norm_back.register_fake
def _norm_back_room(grad_D: Tensor, x_D: Tensor, weight_D: Tensor, scales: Tensor, shifted: bool) -> tuple[Tensor, Tensor]:
    size = x_D.shape[-1]
    rows, together = x_D.numel() // size, max(1, _PIECE // size)
    return torch.empty_like(x_D), x_D.new_empty((-(-rows // together), size), dtype=torch.float32)


def _norm_keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x_D, weight_D, ctx.eps, ctx.shifted, _ = inputs
    ctx.save_for_backward(x_D, weight_D, output[1])
    ctx.mark_non_differentiable(output[1])


def _norm_gradients(ctx: Any, grad_D: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    x_D, weight_D, scales = ctx.saved_tensors
    if torch.is_grad_enabled():
        return (*by_torch(lambda x_D, weight_D: _normed(x_D, weight_D, ctx.eps, ctx.shifted), (x_D, weight_D), grad_D), None, None, None)
    dx_D, sums_PD = torch.ops.fw.rms_norm_backward(grad_D.contiguous(), x_D, weight_D, scales, ctx.shifted)
    wants_weight = ctx.needs_input_grad[1]
    return dx_D, sums_PD.sum(0).to(weight_D.dtype) if wants_weight else None, None, None, None


def _normed(x_D: Tensor, weight_D: Tensor, eps: float, shifted: bool) -> Tensor:
    x_D, weight_D = x_D.float(), weight_D.float()
    return x_D * torch.rsqrt(x_D.square().mean(-1, keepdim=True) + eps) * (1 + weight_D if shifted else weight_D)


_norm.register_autograd(_norm_gradients, setup_context=_norm_keep)


@torch.library.custom_op("fw::rotate", mutates_args=())
def _turn(x_BLNH: Tensor, cos_B1LH: Tensor, sin_B1LH: Tensor, back: bool) -> Tensor:
    y_BLNH = torch.empty_like(x_BLNH)
    batch, length, heads, size = x_BLNH.shape
    given = (x_BLNH.data_ptr(), cos_B1LH.data_ptr(), sin_B1LH.data_ptr(), y_BLNH.data_ptr())
    _TURN(*given, _half(x_BLNH), batch * length, heads, size // 2, len(cos_B1LH) * length, back)
    return y_BLNH


@_turn.register_fake
def _(x_BLNH: Tensor, cos_B1LH: Tensor, sin_B1LH: Tensor, back: bool) -> Tensor:
    return x_BLNH.new_empty(x_BLNH.shape)


def _turn_keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.back = inputs
    ctx.save_for_backward(cos, sin)


def _turn_gradient(ctx: Any, grad_BLNH: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.fw.rotate(grad_BLNH.contiguous(), *ctx.saved_tensors, not ctx.back), None, None, None


_turn.register_autograd(_turn_gradient, setup_context=_turn_keep)


@torch.library.custom_op("fw::silu_mul", mutates_args=())
def _gate(gate: Tensor, up: Tensor) -> Tensor:
    y = torch.empty_like(gate)
    _GATE(gate.data_ptr(), up.data_ptr(), y.data_ptr(), _half(gate), gate.numel())
    return y


@_gate.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate)


@torch.library.custom_op("fw::silu_mul_backward", mutates_args=())
def _gate_back(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    found = torch.empty_like(gate), torch.empty_like(up)
    _GATE_BACK(*(x.data_ptr() for x in (grad, gate, up, *found)), _half(gate), gate.numel())
    return found


@_gate_back.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate), torch.empty_like(up)


def _gate_keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gate_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        return by_torch(lambda gate, up: F.silu(gate.float()) * up.float(), ctx.saved_tensors, grad)
    found: tuple[Tensor, Tensor] = torch.ops.fw.silu_mul_backward(grad.contiguous(), *ctx.saved_tensors)
    return found


_gate.register_autograd(_gate_gradients, setup_context=_gate_keep)
