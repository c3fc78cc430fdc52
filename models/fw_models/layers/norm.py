"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fw.api.kernels import differentiable, elementwise


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x²) + eps) · weight`` over the last dimension (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467).

    The mean is taken in fp32 whatever the dtype of ``x``; the result has the dtype of ``x``, or that of autocast's products where
    kernels of the CPU write it.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x_BLD: Tensor) -> Tensor:
        """``[…, D]`` → ``[…, D]``."""
        for kernels in (differentiable, elementwise):
            if (at_once := kernels.rms_norm(x_BLD, self.weight, self.eps)) is not None:
                return at_once
        x32_BLD = x_BLD.float()
        scale_BL1 = torch.rsqrt(x32_BLD.square().mean(-1, keepdim=True) + self.eps)
        return (x32_BLD * scale_BL1).to(x_BLD.dtype) * self.weight.to(x_BLD.dtype)


class ShiftedRMSNorm(RMSNorm):
    """Gemma's: multiplied with ``1 + weight``, so that weights begin at zero, and multiplied in fp32."""

    def forward(self, x_BLD: Tensor) -> Tensor:
        """``[…, D]`` → ``[…, D]``."""
        for kernels in (differentiable, elementwise):
            if (at_once := kernels.rms_norm(x_BLD, self.weight, self.eps, shifted=True)) is not None:
                return at_once
        x32_BLD = x_BLD.float()
        scale_BL1 = torch.rsqrt(x32_BLD.square().mean(-1, keepdim=True) + self.eps)
        return (x32_BLD * scale_BL1 * (1 + self.weight.float())).to(x_BLD.dtype)
