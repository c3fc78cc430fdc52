"""scaled_dot_product_attention as torch computes it on a GPU, run on fake tensors of the CPU.

Which kernel is taken is the choice of ``select_sdp_backend`` (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, with what surrounds a
kernel from transformers/attention.cpp); what a kernel leaves for backward is torch's own fake kernel's to say. What a backward takes for
itself while it runs no fake kernel knows: :func:`scratch_bytes`.

Shape suffixes: B batch, N query heads, L queries, S keys, H head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Kernel = Literal["cudnn", "flash", "efficient", "math"]

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
_NEWER = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)
"""From there on the memory-efficient kernel takes grouped queries (pytorch/pytorch#191085)."""


@contextmanager
def attention_as_on(capability: tuple[int, int]) -> Iterator[None]:
    """Within it, torch's attention is that of a GPU of this compute capability."""
    original = F.scaled_dot_product_attention

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = (x.to(dtype) for x in (query, key, value))
            attn_mask = attn_mask if attn_mask is None or attn_mask.dtype == torch.bool else attn_mask.to(dtype)
        with torch._C._DisableAutocast():
            kernel = choose(capability, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
            return _compute(kernel, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    F.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


def choose(
    capability: tuple[int, int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    grouped: bool = False,
) -> Kernel:
    """The kernel for these ``[B, N, L, H]``, as torch's wheels for CUDA 13 have them (cuDNN later than 9.15, which Hopper then prefers).

    Args:
        grouped: fewer heads of keys and values than of queries are allowed.
    """
    if not query.dim() == key.dim() == value.dim() == 4 or any(x.stride(-1) != 1 for x in (query, key, value)):
        return "math"
    dtype, alike = query.dtype, query.shape[1] == key.shape[1] == value.shape[1]
    heads_fit = alike or (grouped and query.shape[1] % key.shape[1] == 0)
    low = dtype in _HALVES if capability >= (8, 0) else dtype == torch.float16
    size, sizes = query.shape[-1], {x.shape[-1] for x in (query, key, value)}
    trains = any(x.requires_grad for x in (query, key, value)) and torch.is_grad_enabled()
    if (
        capability[0] in (9, 10)
        and low
        and heads_fit
        and all(s % 8 == 0 and s <= 128 for s in sizes)
        and key.shape[2] != 1
        and (dropout * 16).is_integer()
    ):
        return "cudnn"
    wide = trains and ((8, 6) <= capability <= (8, 9) or capability[0] == 12)  # no backward there for some wide heads
    if (
        (8, 0) <= capability <= (12, 1)
        and low
        and heads_fit
        and mask is None
        and sizes == {size}
        and size <= 256
        and not (causal and query.shape[2] != key.shape[2])
        and not (wide and not (size <= 192 or (dropout == 0 and size > 224)))
    ):
        return "flash"
    multiple = _alignment(capability, dtype)
    if (
        (low or dtype in (torch.float16, torch.float32))
        and (alike or (_NEWER and heads_fit))
        and size == key.shape[-1]
        and all(s % multiple == 0 for s in sizes)
    ):
        return "efficient"
    return "math"


def _alignment(capability: tuple[int, int], dtype: torch.dtype) -> int:
    """What the memory-efficient kernel wants heads to be a multiple of (``minimum_gemm_alignment``)."""
    half = dtype in _HALVES
    tensor_cores = capability >= (8, 0) or (capability >= (7, 0) and half)
    return max(4 if capability >= (8, 0) else 1, 128 // (16 if half else 32) if tensor_cores else 1)


def _compute(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> Tensor:
    """As ``scaled_dot_product_attention`` of attention.cpp calls it."""
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=query.dtype, device=query.device))
    for_backward = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    out: Tensor
    if kernel == "cudnn":
        out, *_ = _aten._scaled_dot_product_cudnn_attention(query, key, value, mask, for_backward, dropout, causal, False, scale=scale)
        return out
    if kernel == "flash":
        size = query.shape[-1]
        if scale is None:
            scale = size**-0.5
        query, key, value = (F.pad(x, (0, -size % 8)) if size % 8 else x for x in (query, key, value))
        out, *_ = _aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, False, scale=scale)
        return out[..., :size] if size % 8 else out
    if kernel == "efficient":
        if mask is not None:
            keys = mask.shape[-1]
            if keys % 16:
                mask = F.pad(mask, (0, -keys % 16))[..., :keys]
            mask = mask.expand(*query.shape[:2], query.shape[2], key.shape[2])
        if key.shape[1] != query.shape[1]:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        out, *_ = _aten._scaled_dot_product_efficient_attention(query, key, value, mask, for_backward, dropout, causal, scale=scale)
        return out
    out, *_ = _aten._scaled_dot_product_attention_math(query, key, value, mask, dropout, causal, None, scale=scale, enable_gqa=grouped)
    return out


def scratch_bytes(func: Any, args: Any) -> list[int]:
    """What an operator of attention allocates besides its results while it runs, each allocation's bytes; empty for all others.

    flash: ``mha_bwd`` of flash_attn/flash_api.cpp. Memory-efficient: ``_efficient_attention_backward`` of attention_backward.cu and the
    workspaces of mem_eff_attention/kernel_backward.h. cuDNN's workspace is not documented: flash's is assumed, whose algorithm it has.
    """
    packet = func.overloadpacket
    if packet in (_aten._scaled_dot_product_flash_attention_backward, _aten._scaled_dot_product_cudnn_attention_backward):
        grad, query, key, _, out = args[:5]
        return _flash_scratch(query, key) + [x.nbytes for x in (grad, out) if not x.transpose(1, 2).is_contiguous()]
    if packet is _aten._scaled_dot_product_efficient_attention_backward:
        return _efficient_scratch(*args[:4])
    return []


def _flash_scratch(query: Tensor, key: Tensor) -> list[int]:
    """Sums of softmax, the gradient of queries in fp32; gradients of keys and values for each query head where those are grouped."""
    batch, heads, length, size = query.shape
    rows, columns = _up(length, 128), _up(size, 32) if size <= 192 else 256
    expanded = [batch * heads * key.shape[2] * size * query.element_size()] * 2 if key.shape[1] != heads else []
    return [4 * batch * heads * rows, 4 * batch * rows * heads * columns, *expanded]


def _efficient_scratch(grad: Tensor, query: Tensor, key: Tensor, value: Tensor) -> list[int]:
    """Row sums of gradient times result; sums in fp32 of gradients that are halves and do not fit into registers."""
    batch, heads, length, size = query.shape
    copied = [] if grad.transpose(1, 2).is_contiguous() else [grad.nbytes]
    delta = 4 * batch * heads * length
    if query.dtype == torch.float32:
        return [*copied, 4 * batch * heads * length * value.shape[-1], delta]
    of_queries = 4 * batch * heads * _up(length, 64) * _up(size, 64)
    of_keys = [4 * batch * heads * _up(key.shape[2], 64) * _up(size, 64)] * 2 if max(size, value.shape[-1]) > 128 else []
    return [*copied, delta, of_queries, *of_keys]


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
