"""Cross-entropy of logits on the CPU, with the gradient in their place: an operator of torch's."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fw.kernels.calls import Kernel
from fw.kernels.of_cpu import DTYPES, of_cpu

_LOSS = Kernel("fw_token_loss", [ctypes.c_void_p] * 3 + [ctypes.c_long] * 5 + [ctypes.c_float] * 3)


def takes(dtype: torch.dtype, *tensors: Tensor) -> bool:
    """Whether :func:`token_losses` is for logits of this dtype that such tensors make, here or in what is planned."""
    return of_cpu(*tensors) and dtype in DTYPES and _LOSS.available


def token_losses(
    z_TV: Tensor, labels_T: Tensor, *, ignored: int, softcap: float | None, smoothing: float, z_loss: float, gradient: bool
) -> Tensor:
    """``(1 - s) · (log Z - z_y) + s · (log Z - mean z) + w · log² Z`` of each token, fp32 ``[T]``; 0 where the label is ``ignored``.

    Args:
        z_TV: logits before ``softcap``, contiguous; the gradient of the sum afterwards, where ``gradient``.
        smoothing: s.
        z_loss: w.

    Raises:
        IndexError: a label is none of the logits, as torch's own cross-entropy raises.
    """
    found: Tensor = torch.ops.fw.token_losses(z_TV, labels_T, ignored, softcap or 0.0, smoothing, z_loss, gradient)
    return found


@torch.library.custom_op("fw::token_losses", mutates_args=("z_TV",))
def _losses(z_TV: Tensor, labels_T: Tensor, ignored: int, softcap: float, smoothing: float, z_loss: float, gradient: bool) -> Tensor:
    labels_T = labels_T.contiguous()
    if labels_T.dtype != torch.int64 or labels_T.shape != z_TV.shape[:1] or not z_TV.is_contiguous():
        raise ValueError(f"labels are int64 [T] of contiguous logits [T, V], not {labels_T.dtype} {list(labels_T.shape)}")
    outside_T = (labels_T != ignored) & ((labels_T < 0) | (labels_T >= z_TV.shape[1]))
    if outside_T.any():
        raise IndexError(f"label {labels_T[outside_T][0].item()} is none of {z_TV.shape[1]} tokens")
    losses_T = z_TV.new_empty(len(labels_T), dtype=torch.float32)
    given = (z_TV.data_ptr(), labels_T.data_ptr(), losses_T.data_ptr(), z_TV.dtype == torch.bfloat16, *z_TV.shape)
    _LOSS(*given, ignored, gradient, softcap, smoothing, z_loss)
    return losses_T


@_losses.register_fake
def _(z_TV: Tensor, labels_T: Tensor, ignored: int, softcap: float, smoothing: float, z_loss: float, gradient: bool) -> Tensor:
    return z_TV.new_empty(len(labels_T), dtype=torch.float32)
