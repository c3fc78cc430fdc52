"""Feed-forward networks."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class GatedMLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) · up(x))`` (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """``[B, L, D]`` → ``[B, L, D]``."""
        return self.down_proj(F.silu(self.gate_proj(x_BLD)) * self.up_proj(x_BLD))
