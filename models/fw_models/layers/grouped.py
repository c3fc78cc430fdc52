"""Matrix products of rows in groups, each group with a matrix of its own: what a mixture of experts computes.

The rows stand sorted by group, and where each group ends is a tensor. Sizes of inputs and outputs do not depend on it, so the products
compile, and trace with fake tensors. On GPUs bf16 goes to torch's grouped kernel; elsewhere the groups are multiplied one after another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fw.api.kernels import fixed_rows


def grouped_linear(x_TD: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """Row t of group e times ``weight[e]`` transposed, ``[T, F]``; in the dtype autocast asks for, where it is on.

    Args:
        x_TD: rows sorted by group.
        ends_E: int32; one past each group's last row. The last is T.
    """
    kind = x_TD.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x_TD, weight_EFD = x_TD.to(dtype), weight_EFD.to(dtype)
    return _multiply(x_TD, weight_EFD.transpose(1, 2), ends_E)


def _has_kernel(x: Tensor, *sizes: int) -> bool:
    """torch's grouped kernel: bf16, rows of whole 16 bytes, and a GPU that has it."""
    aligned = all(size % 8 == 0 for size in sizes)
    return x.is_cuda and x.dtype == torch.bfloat16 and aligned and torch.cuda.get_device_capability(x.device) >= (8, 0)


@torch.library.custom_op("fw::grouped_mm", mutates_args=())
def _multiply(x_TK: Tensor, weight_EKN: Tensor, ends_E: Tensor) -> Tensor:
    if (rows := fixed_rows.rows_of_products()) is not None:
        return fixed_rows.grouped_product(x_TK, weight_EKN, ends_E.tolist(), rows)
    if _has_kernel(x_TK, x_TK.shape[1], weight_EKN.shape[2]):
        return torch._grouped_mm(x_TK.contiguous(), weight_EKN, offs=ends_E)
    out_TN = x_TK.new_empty(x_TK.shape[0], weight_EKN.shape[2])
    start = 0
    for group, end in enumerate(ends_E.tolist()):
        if end > start:
            torch.mm(x_TK[start:end], weight_EKN[group], out=out_TN[start:end])
        start = end
    return out_TN


@_multiply.register_fake
def _(x_TK: Tensor, weight_EKN: Tensor, ends_E: Tensor) -> Tensor:
    return x_TK.new_empty(x_TK.shape[0], weight_EKN.shape[2])


@torch.library.custom_op("fw::grouped_outer", mutates_args=())
def _outer(a_TM: Tensor, b_TN: Tensor, ends_E: Tensor) -> Tensor:
    """``aᵀ b`` of each group's rows, ``[E, M, N]``; zero for a group without rows."""
    if _has_kernel(a_TM, a_TM.shape[1], b_TN.shape[1]):
        product_EMN = torch._grouped_mm(a_TM.contiguous().t(), b_TN.contiguous(), offs=ends_E)
        rows_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        return product_EMN.masked_fill_((rows_E == 0)[:, None, None], 0)  # the kernel may leave a group without rows unwritten
    out_EMN = a_TM.new_empty(ends_E.shape[0], a_TM.shape[1], b_TN.shape[1])
    start = 0
    for group, end in enumerate(ends_E.tolist()):
        torch.mm(a_TM[start:end].t(), b_TN[start:end], out=out_EMN[group])
        start = end
    return out_EMN


@_outer.register_fake
def _(a_TM: Tensor, b_TN: Tensor, ends_E: Tensor) -> Tensor:
    return a_TM.new_empty(ends_E.shape[0], a_TM.shape[1], b_TN.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x_TK, weight_EKN, ends_E = ctx.saved_tensors
    grad_TN = grad_TN.contiguous()
    grad_x = _multiply(grad_TN, weight_EKN.transpose(1, 2), ends_E) if ctx.needs_input_grad[0] else None
    # Weights arrive as a transposed view of [E, N, K]; their gradient is computed in that layout, so that it needs no copy.
    grad_weight = _outer(grad_TN, x_TK, ends_E).transpose(1, 2) if ctx.needs_input_grad[1] else None
    return grad_x, grad_weight, None


_multiply.register_autograd(_backward, setup_context=_keep)


@register_flop_formula(torch.ops.fw.grouped_mm)
def _multiply_flops(x: Any, weight: Any, ends: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * x[0] * x[1] * weight[2]


@register_flop_formula(torch.ops.fw.grouped_outer)
def _outer_flops(a: Any, b: Any, ends: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * a[0] * a[1] * b[1]
