"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864), in the half-split layout of Hugging Face's Llama."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_angles(positions_BL: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[B, 1, L, H]`` in fp32 of ``position · theta^(-2i/H)``, each angle twice: for both halves of a head."""
    exponents = torch.arange(0, head_dim, 2, device=positions_BL.device, dtype=torch.int64).float() / head_dim
    frequencies_h = 1.0 / theta**exponents
    angles_BLh = positions_BL[..., None].float() * frequencies_h
    angles_B1LH = torch.cat((angles_BLh, angles_BLh), dim=-1)[:, None]
    return angles_B1LH.cos(), angles_B1LH.sin()


def rotate(x_BNLH: Tensor, cos_B1LH: Tensor, sin_B1LH: Tensor) -> Tensor:
    """Rotate the pairs ``(x_i, x_{i+H/2})``; computed in the dtype of ``x``."""
    first, second = x_BNLH.chunk(2, dim=-1)
    turned_BNLH = torch.cat((-second, first), dim=-1)
    return x_BNLH * cos_B1LH.to(x_BNLH.dtype) + turned_BNLH * sin_B1LH.to(x_BNLH.dtype)
