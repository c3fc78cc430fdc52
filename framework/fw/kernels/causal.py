"""Causal attention of whole sequences on the CPU, with gradients: an operator of torch's whose memory is that of its results.

A query sees keys up to its own place, of its document and within a window where these are given. Where gradients are to be differentiated
again (``create_graph=True``) backward writes all scores out, by torch's operators.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from fw.kernels.calls import Kernel
from fw.kernels.of_cpu import DTYPES, of_cpu, wanted
from fw.kernels.twice import by_torch

_LANES = 16
_LARGEST = 256
_FORWARD = Kernel("fw_causal_forward", [ctypes.c_void_p])
_BACKWARD = Kernel("fw_causal_backward", [ctypes.c_void_p])
_PLACES = ("q", "k", "v", "out", "grad", "to", "dq", "dk", "dv", "lse", "segments")
_SIZES = ("half", "batch", "heads", "kv_heads", "length", "dim", "window")
_STEPS = ("q", "k", "v", "out", "grad", "dq", "dk", "dv")


class _Call(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in _PLACES),
        *((name, ctypes.c_long) for name in _SIZES),
        *((f"{name}_step", ctypes.c_long * 3) for name in _STEPS),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    ]


def available() -> bool:
    """Whether there is such a kernel on this machine. To be asked before a compiled block asks, which cannot compile it."""
    return wanted() and _FORWARD.available


def takes(q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor) -> bool:
    """Whether :func:`attend` computes these on this machine, or would in what is planned."""
    if not of_cpu(q_BNLH, k_BKLH, v_BKLH) or not q_BNLH.dtype == k_BKLH.dtype == v_BKLH.dtype or q_BNLH.dtype not in DTYPES:
        return False
    (batch, heads, length, size), kv_heads = q_BNLH.shape, k_BKLH.shape[1]
    same = k_BKLH.shape == v_BKLH.shape == (batch, kv_heads, length, size)
    if not same or not q_BNLH.numel() or not kv_heads or heads % kv_heads:
        return False
    return size % _LANES == 0 and size <= _LARGEST and _FORWARD.available


def attend(
    q_BNLH: Tensor,
    k_BKLH: Tensor,
    v_BKLH: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    segments_BL: Tensor | None = None,
) -> Tensor:
    """``softmax(scale · q kᵀ) v`` over the positions seen, ``[B, N, L, H]`` in q's dtype, laid out ``[B, L, N, H]``.

    Args:
        softcap: c of scores that are ``c · tanh(scale · q kᵀ / c)``.
        window: how many positions back a position sees, itself included.
        segments_BL: the document of each position; ``[1, L]`` where all rows have the same.
    """
    if segments_BL is not None:
        segments_BL = segments_BL.long().expand(len(q_BNLH), q_BNLH.shape[2]).contiguous()
    rows = (_rows(x) for x in (q_BNLH, k_BKLH, v_BKLH))
    out_BNLH, _ = torch.ops.fw.causal_attention(*rows, segments_BL, scale, softcap or 0.0, window or 0)
    found: Tensor = out_BNLH
    return found


def _like(x_BNLH: Tensor) -> Tensor:
    """Room for as much, a position's heads side by side: as projections read it and write it."""
    b, n, length, h = x_BNLH.shape
    return x_BNLH.new_empty((b, length, n, h)).transpose(1, 2)


def _call(of: Mapping[str, Tensor | None], scale: float, softcap: float, window: int) -> _Call:
    q, k = of["q"], of["k"]
    assert q is not None and k is not None
    batch, heads, length, dim = q.shape
    window = min(window, length)
    call = _Call(scale=scale, softcap=softcap, window=window, batch=batch, heads=heads, kv_heads=k.shape[1], length=length, dim=dim)
    call.half = q.dtype == torch.bfloat16
    for name, x in of.items():
        if x is not None:
            setattr(call, name, x.data_ptr())
            if name in _STEPS or name == "to":
                setattr(call, f"{'out' if name == 'to' else name}_step", (ctypes.c_long * 3)(*x.stride()[:3]))
    return call


def _rows(x_BNLH: Tensor) -> Tensor:
    return x_BNLH if x_BNLH.stride(-1) == 1 else x_BNLH.contiguous()


@torch.library.custom_op("fw::causal_attention", mutates_args=())
def _forward(
    q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, segments_BL: Tensor | None, scale: float, softcap: float, window: int
) -> tuple[Tensor, Tensor]:
    out_BNLH, lse_BNL = _forward_room(q_BNLH)
    given: dict[str, Tensor | None] = {"q": q_BNLH, "k": k_BKLH, "v": v_BKLH}
    given |= {"to": out_BNLH, "lse": lse_BNL, "segments": segments_BL}
    call = _call(given, scale, softcap, window)
    _FORWARD(ctypes.addressof(call))
    return out_BNLH, lse_BNL


@_forward.register_fake
def _forward_room(q_BNLH: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _like(q_BNLH), q_BNLH.new_empty(q_BNLH.shape[:3], dtype=torch.float32)


@torch.library.custom_op("fw::causal_attention_backward", mutates_args=())
def _backward(
    grad_BNLH: Tensor,
    q_BNLH: Tensor,
    k_BKLH: Tensor,
    v_BKLH: Tensor,
    segments_BL: Tensor | None,
    out_BNLH: Tensor,
    lse_BNL: Tensor,
    scale: float,
    softcap: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    found = _backward_room(grad_BNLH, q_BNLH, k_BKLH, v_BKLH)
    given: dict[str, Tensor | None] = {"q": q_BNLH, "k": k_BKLH, "v": v_BKLH}
    given |= {"out": out_BNLH, "grad": grad_BNLH}
    given |= {"lse": lse_BNL, "segments": segments_BL, **dict(zip(("dq", "dk", "dv"), found, strict=True))}
    call = _call(given, scale, softcap, window)
    _BACKWARD(ctypes.addressof(call))
    return found


@_backward.register_fake
def _backward_room(_: Tensor, *qkv: Any) -> tuple[Tensor, Tensor, Tensor]:
    q_BNLH, k_BKLH, v_BKLH = qkv[:3]
    return _like(q_BNLH), _like(k_BKLH), _like(v_BKLH)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, segments, *ctx.how = inputs
    ctx.save_for_backward(q, k, v, segments, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad_BNLH: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    q, k, v, segments, out, lse = ctx.saved_tensors
    if torch.is_grad_enabled():
        return (*by_torch(lambda q, k, v: _written_out(q, k, v, segments, *ctx.how), (q, k, v), grad_BNLH), None, None, None, None)
    found = torch.ops.fw.causal_attention_backward(_rows(grad_BNLH), q, k, v, segments, out, lse, *ctx.how)
    return (*found, None, None, None, None)


def _written_out(
    q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, segments_BL: Tensor | None, scale: float, softcap: float, window: int
) -> Tensor:
    group, length = q_BNLH.shape[1] // k_BKLH.shape[1], q_BNLH.shape[2]
    k_BNLH, v_BNLH = (x.float().repeat_interleave(group, 1) for x in (k_BKLH, v_BKLH))
    scores_BNLL = scale * q_BNLH.float() @ k_BNLH.transpose(-1, -2)
    if softcap:
        scores_BNLL = softcap * torch.tanh(scores_BNLL / softcap)
    behind_LL = torch.arange(length, device=q_BNLH.device)[:, None] - torch.arange(length, device=q_BNLH.device)
    seen = behind_LL >= 0
    if window:
        seen = seen & (behind_LL < window)
    if segments_BL is not None:
        seen = seen & (segments_BL[:, None, :, None] == segments_BL[:, None, None, :])
    return scores_BNLL.masked_fill(~seen, float("-inf")).softmax(-1) @ v_BNLH


_forward.register_autograd(_gradients, setup_context=_keep)


def _counted(query: Any, key: Any) -> tuple[Any, Any]:
    return query, (key[0], query[1], *key[2:])  # grouped ones are used by each query head


@register_flop_formula(torch.ops.fw.causal_attention)
def _forward_flops(query: Any, key: Any, *args: Any, **kwargs: Any) -> int:
    query, key = _counted(query, key)
    return int(sdpa_flop_count(query, key, key)) // 2


@register_flop_formula(torch.ops.fw.causal_attention_backward)
def _backward_flops(grad: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> int:
    query, key = _counted(query, key)
    return int(sdpa_backward_flop_count(query, query, key, key)) // 2
