"""The package flash-attn 2 as its documentation describes it, in plain operations and for any device and dtype.

What fw calls has the package's names, arguments and layouts; its forward is an operator of the package's name, which draws random numbers
without saying so, as there. ``calls`` counts the operator's executions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__version__ = "2.8.3"
calls: list[str] = []


def _one(q_LNH, k_SKH, v_SKH, dropout_p, scale, causal, left, right, softcap, generator) -> Tensor:
    """One sequence: masks aligned at the bottom right, both ends of a window seen, rows that see nothing zero."""
    group = q_LNH.shape[1] // k_SKH.shape[1]
    k_SNH, v_SNH = k_SKH.repeat_interleave(group, 1), v_SKH.repeat_interleave(group, 1)
    scores_NLS = torch.einsum("lnh,snh->nls", q_LNH, k_SNH) * scale
    if softcap > 0:
        scores_NLS = softcap * torch.tanh(scores_NLS / softcap)
    at_L1 = torch.arange(len(q_LNH))[:, None] + len(k_SKH) - len(q_LNH)
    at_1S = torch.arange(len(k_SKH))[None, :]
    hidden_LS = torch.zeros(len(q_LNH), len(k_SKH), dtype=torch.bool)
    if causal or right >= 0:
        hidden_LS |= at_1S > at_L1 + (0 if causal else right)
    if left >= 0:
        hidden_LS |= at_1S < at_L1 - left
    weights_NLS = scores_NLS.masked_fill(hidden_LS, float("-inf")).softmax(-1).nan_to_num(0)
    if dropout_p > 0:
        kept = torch.rand(weights_NLS.shape, generator=generator) >= dropout_p
        weights_NLS = weights_NLS * kept / (1 - dropout_p)
    return torch.einsum("nls,snh->lnh", weights_NLS, v_SNH)


def _check(q, k, v, dropout_p, softcap) -> None:
    assert q.dtype == k.dtype == v.dtype and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert q.shape[-1] <= 256 and q.shape[-2] % k.shape[-2] == 0 and k.shape == v.shape
    assert 0 <= dropout_p < 1 and not (softcap > 0 and dropout_p > 0)


def _rows(q, k, v, offsets_q, offsets_k, options, seed) -> Tensor:
    generator = torch.Generator().manual_seed(int(seed))
    parts = [
        _one(q[a:b], k[c:d], v[c:d], *options, generator)
        for a, b, c, d in zip(offsets_q, offsets_q[1:], offsets_k, offsets_k[1:], strict=False)
    ]
    return torch.cat(parts)


_OPTIONS = "float dropout_p, float softmax_scale, bool causal, int window_size_left, int window_size_right, float softcap"
_library = torch.library.Library("flash_attn", "DEF")
_library.define(f"_flash_attn_forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor, Tensor)")
_library.define(
    "_flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q,"
    f" SymInt max_seqlen_k, {_OPTIONS}) -> (Tensor, Tensor, Tensor)"
)


def _forward(q, k, v, *options):
    _check(q, k, v, options[0], options[5])
    calls.append("flash_attn_func")
    seed = torch.randint(1 << 40, ()) if options[0] > 0 else torch.zeros((), dtype=torch.int64)
    ends_q, ends_k = (list(range(0, x.shape[0] * x.shape[1] + 1, x.shape[1])) for x in (q, k))
    out = _rows(*(x.flatten(0, 1) for x in (q, k, v)), ends_q, ends_k, options, seed)
    return out.view(q.shape), q.new_zeros(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32), seed


def _varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options):
    _check(q, k, v, options[0], options[5])
    for offsets, longest, x in ((cu_seqlens_q, max_seqlen_q, q), (cu_seqlens_k, max_seqlen_k, k)):
        assert offsets.dtype == torch.int32 and offsets[0] == 0 and offsets[-1] == len(x) and (offsets.diff() > 0).all()
        assert longest == offsets.diff().max() and x.dim() == 3
    calls.append("flash_attn_varlen_func")
    seed = torch.randint(1 << 40, ()) if options[0] > 0 else torch.zeros((), dtype=torch.int64)
    return _rows(q, k, v, cu_seqlens_q, cu_seqlens_k, options, seed), q.new_zeros(q.shape[1], q.shape[0], dtype=torch.float32), seed


_library.impl("_flash_attn_forward", _forward, "CPU")
_library.impl("_flash_attn_varlen_forward", _varlen_forward, "CPU")


def _backward(grad, q, k, v, seed, cu_seqlens_q, cu_seqlens_k, *options):
    lengths = cu_seqlens_q, cu_seqlens_k
    ends_q, ends_k = (
        list(range(0, x.shape[0] * x.shape[1] + 1, x.shape[1])) if ends is None else ends for x, ends in zip((q, k), lengths, strict=True)
    )
    with torch.enable_grad():
        given = [x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for x in (q, k, v)]
        rows = [x.flatten(0, 1) for x in given] if cu_seqlens_q is None else given
        out = _rows(*rows, ends_q, ends_k, options, seed)
        return torch.autograd.grad(out, given, grad.reshape(out.shape))


_library.define(
    f"_stand_in_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor seed, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor)"
)
_library.impl("_stand_in_backward", _backward, "CPU")


def _shapes(q, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32), q.new_empty((), dtype=torch.int64)


torch.library.register_fake("flash_attn::_flash_attn_forward", _shapes, lib=_library)
torch.library.register_fake("flash_attn::_flash_attn_varlen_forward", _shapes, lib=_library)


@torch.library.register_fake("flash_attn::_stand_in_backward", lib=_library)
def _gradient_shapes(grad, q, k, v, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, lengths, options):
        op = torch.ops.flash_attn._flash_attn_varlen_forward if lengths else torch.ops.flash_attn._flash_attn_forward
        out, _, seed = op(q, k, v, *lengths, *options)
        ctx.save_for_backward(q, k, v, seed, *lengths[:2])
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, seed, *offsets = ctx.saved_tensors
        lengths = offsets or (None, None)
        return *torch.ops.flash_attn._stand_in_backward(grad, q, k, v, seed, *lengths, *ctx.options), None, None


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    assert alibi_slopes is None and not return_attn_probs and q.dim() == 4
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return _Function.apply(q, k, v, (), (dropout_p, scale, causal, *window_size, softcap))


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    assert alibi_slopes is None and block_table is None and not return_attn_probs
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _Function.apply(q, k, v, lengths, (dropout_p, scale, causal, *window_size, softcap))
