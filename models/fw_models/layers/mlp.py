"""Feed-forward networks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from fw.api.kernels import differentiable, elementwise, linear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
"""By Hugging Face's names."""


class GatedMLP(nn.Module):
    """``down(act(gate(x)) · up(x))``: SwiGLU with silu, GeGLU with gelu (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, activation: str = "silu", bias: bool = False) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """``[B, L, D]`` → ``[B, L, D]``."""
        if self.activation is F.silu:
            if elementwise.applies(x_BLD) and (both := linear.silu_gated(self.gate_proj, self.up_proj, x_BLD)) is not None:
                return self.down_proj(both)
            for kernels in (differentiable, elementwise):
                if kernels.applies(x_BLD):
                    gate, up = self.gate_proj(x_BLD), self.up_proj(x_BLD)
                    at_once = kernels.silu_mul(gate, up)
                    return self.down_proj(F.silu(gate) * up if at_once is None else at_once)
        # Nothing holds what the gate was: without gradients it is gone before the next product begins.
        return self.down_proj(self.activation(self.gate_proj(x_BLD)) * self.up_proj(x_BLD))
