"""Cross-entropy of a linear head some tokens at a time, so that the logits of a whole batch never exist.

Loss and gradients of a chunk are computed together while its logits are there; what stays is the gradient of the hidden states and the
sum of the weight's. Nothing is computed twice: two matrix products per chunk for the gradients and one for the logits, as without chunks.
(The idea is Liger's fused linear cross-entropy, https://arxiv.org/abs/2410.10989, here in plain tensor operations.)

Shape suffixes: T tokens, c tokens of a chunk, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fw.api import IGNORED, Head, LinearHead
from fw.api.kernels import loss as kernels, matrix

_ROWS_AT_A_TIME = 4096
"""Of the weight's gradient, where it is summed in another dtype than the products have."""


@dataclass(frozen=True)
class TokenLoss:
    """``(1 - s) · (log Z - z_y) + s · (log Z - mean z) + w · log² Z`` of logits z, label y and Z = Σ exp z; 0 where y is ignored.

    Attributes:
        z_loss: w.
        smoothing: s (Szegedy et al. 2016, https://arxiv.org/abs/1512.00567).
    """

    z_loss: float = 0.0
    smoothing: float = 0.0

    def of_logits(self, logits_TV: Tensor, labels_T: Tensor) -> Tensor:
        """Summed over tokens. Logits may be a DTensor divided along the vocabulary."""
        loss = F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORED, reduction="sum")
        if not (self.z_loss or self.smoothing):
            return loss
        # Products and no selections, which logits divided between ranks do not know.
        counted_T = labels_T != IGNORED
        lse_T = logits_TV.logsumexp(-1)
        if self.smoothing:
            loss = (1 - self.smoothing) * loss + self.smoothing * ((lse_T - logits_TV.mean(-1)) * counted_T).sum()
        if self.z_loss:
            loss = loss + self.z_loss * (lse_T.square() * counted_T).sum()
        return loss

    def chunked(self, x_TD: Tensor, head: Head, labels_T: Tensor, tokens: int) -> Tensor:
        """The same of ``head(x_TD)``, ``tokens`` at a time.

        Of a head that is no :class:`LinearHead` the logits of a chunk are computed again in backward.
        """
        if isinstance(head, LinearHead):
            loss: Tensor = _Chunked.apply(x_TD, head.weight_VD, labels_T, self, head.softcap, tokens, torch.is_grad_enabled())
            return loss
        losses = [self._again(x, head, y) for x, y in zip(x_TD.split(tokens), labels_T.split(tokens), strict=True)]
        return sum(losses[1:], losses[0])

    def _again(self, x_cD: Tensor, head: Head, labels_c: Tensor) -> Tensor:
        def loss(x_cD: Tensor) -> Tensor:
            return self.of_logits(head(x_cD[None]).flatten(0, 1).float(), labels_c)

        if not torch.is_grad_enabled():
            return loss(x_cD)
        repeated: Tensor = checkpoint(loss, x_cD, use_reentrant=False)
        return repeated


def at_once(x_TD: Tensor, head: Head) -> bool:
    """Whether loss and gradients together take less time and memory than one after the other even for all tokens."""
    device = x_TD.device.type
    dtype = torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else x_TD.dtype
    return isinstance(head, LinearHead) and len(x_TD) > 0 and kernels.takes(dtype, x_TD, head.weight_VD)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        token_loss: TokenLoss,
        softcap: float | None,
        tokens: int,
        learns: bool,
    ) -> Tensor:
        device = x_TD.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_TD.dtype
        # What asks for a gradient does so also where nobody will ask for it: whoever calls knows.
        wants_x, wants_weight = (learns and wanted for wanted in ctx.needs_input_grad[:2])
        chunk = _chunk_by_kernel if kernels.takes(dtype, x_TD, weight_VD) else _chunk
        with torch.autocast(device, enabled=False):
            by_matrix = matrix.takes(x_TD.detach().to(dtype), weight_VD.detach().t(), dtype)  # which reads weights in any dtype
            product_VD = weight_VD.detach() if by_matrix else weight_VD.detach().to(dtype)
            total = torch.zeros((), device=x_TD.device)
            grad_x_TD = torch.empty_like(x_TD) if wants_x else None
            summed = weight_VD.dtype if tokens >= len(x_TD) else torch.float32
            room = torch.empty_like if len(x_TD) else torch.zeros_like  # which the first chunk fills
            grad_weight_VD = room(weight_VD, dtype=summed) if wants_weight else None
            for first in range(0, len(x_TD), tokens):
                rows = slice(first, first + tokens)
                x_cD, labels_c = x_TD[rows].detach().to(dtype), labels_T[rows]
                z_cV = matrix.product(x_cD, product_VD.t(), dtype) if by_matrix else F.linear(x_cD, product_VD)
                loss, grad_cV = chunk(z_cV, labels_c, token_loss, softcap, wants_x or wants_weight)
                del z_cV
                total += loss
                if grad_cV is not None:
                    grad_cV = grad_cV.to(dtype)
                    if grad_x_TD is not None:
                        grad_x_TD[rows] = matrix.product(grad_cV, product_VD, torch.float32) if by_matrix else grad_cV @ product_VD
                    if grad_weight_VD is not None:
                        add_product(grad_weight_VD, grad_cV, x_cD, to_nothing=first == 0)
                    del grad_cV  # before the next chunk's logits
        ctx.gradients = grad_x_TD, None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (*scaled(ctx, grad), None, None, None, None, None)


def scaled(ctx: Any, grad: Tensor) -> Iterator[Tensor | None]:
    """The gradients that forward has left there, times that of what it gave; in their memory.

    Raises:
        RuntimeError: a second time, or for gradients that are to be differentiated again.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "this loss has computed its gradients in forward, and they cannot be differentiated (create_graph=True): "
            "use objective.chunk_tokens=0 with FW_TRAINING_KERNELS=off in the environment"
        )
    if not hasattr(ctx, "gradients"):
        raise RuntimeError("this loss has computed its gradients in forward and given them away: a second backward needs another forward")
    gradients: tuple[Tensor | None, ...] = ctx.gradients
    del ctx.gradients
    # Not in their dtype: one part in 256 too much would be so of all gradients but the head's.
    return (None if each is None else each.mul_(grad) for each in gradients)


def _chunk_by_kernel(
    z_cV: Tensor, labels_c: Tensor, token_loss: TokenLoss, softcap: float | None, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """As :func:`_chunk`, with the gradient in the dtype and in the memory of ``z_cV``."""
    losses_c = kernels.token_losses(
        z_cV,
        labels_c,
        ignored=IGNORED,
        softcap=softcap,
        smoothing=token_loss.smoothing,
        z_loss=token_loss.z_loss,
        gradient=with_gradient,
    )
    return losses_c.sum(), z_cV if with_gradient else None


def _chunk(
    product_cV: Tensor, labels_c: Tensor, token_loss: TokenLoss, softcap: float | None, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """The loss of a chunk, and its gradient in fp32, in the memory of ``product_cV`` where that is fp32."""
    z_cV = product_cV.float()
    del product_cV
    slope_cV = None
    if softcap is not None:
        slope_cV = z_cV.div_(softcap).tanh_()
        z_cV = slope_cV * softcap
    s, w = token_loss.smoothing, token_loss.z_loss
    counted_c1 = (labels_c != IGNORED)[:, None]
    labels_c1 = labels_c.where(counted_c1[:, 0], 0)[:, None]
    label_c1 = z_cV.gather(1, labels_c1)
    mean_c1 = z_cV.mean(-1, keepdim=True) if s else 0.0
    most_c1 = z_cV.amax(-1, keepdim=True)
    grad_cV = z_cV.sub_(most_c1).exp_()
    sum_c1 = grad_cV.sum(-1, keepdim=True)
    lse_c1 = sum_c1.log() + most_c1
    each_c1 = lse_c1 - (1 - s) * label_c1 - s * mean_c1 + w * lse_c1.square()
    loss = (each_c1 * counted_c1).sum()
    if not with_gradient:
        return loss, None
    grad_cV.mul_((1 + 2 * w * lse_c1) / sum_c1)
    if s:
        grad_cV.sub_(s / grad_cV.shape[1])
    grad_cV.scatter_add_(1, labels_c1, torch.full_like(labels_c1, s - 1, dtype=grad_cV.dtype))
    grad_cV.mul_(counted_c1)
    if slope_cV is not None:
        grad_cV.mul_(slope_cV.square_().neg_().add_(1))
    return loss, grad_cV


def add_product(sum_VD: Tensor, grad_cV: Tensor, x_cD: Tensor, *, to_nothing: bool) -> None:
    """``sum += gradᵀ x``, in fp32 whatever the factors are; no second copy of the sum.

    Args:
        to_nothing: the sum is this product; what it holds before does not matter.
    """
    if sum_VD.stride(1) == 1 and matrix.takes(grad_cV.t(), x_cD, sum_VD.dtype):
        matrix.add_product(sum_VD, grad_cV.t(), x_cD, to_nothing=to_nothing)
        return
    if grad_cV.dtype == sum_VD.dtype:
        sum_VD.addmm_(grad_cV.t(), x_cD, beta=0 if to_nothing else 1)
        return
    for begin in range(0, len(sum_VD), _ROWS_AT_A_TIME):
        rows = slice(begin, begin + _ROWS_AT_A_TIME)
        product_rD = grad_cV[:, rows].t() @ x_cD
        if to_nothing:
            sum_VD[rows] = product_rD
        else:
            sum_VD[rows] += product_rD
