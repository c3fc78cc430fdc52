"""Linear layers in bfloat16 by a kernel of fw's own: weights are read once, at the speed of memory, and a row's result does not depend on
how many others there are."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fw.kernels.build import NotCompiled, library

PANEL = 32


@functools.cache
def function(flags: Sequence[str] = ()) -> Callable[..., None]:
    """``fw_linear_bf16`` of linear.cpp.

    Args:
        flags: further ones for the compiler.

    Raises:
        NotCompiled: with the reason.
    """
    found = library(flags).fw_linear_bf16
    found.restype = None
    found.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long] * 3
    return found


def available() -> bool:
    """Whether the kernel can be had on this machine."""
    try:
        function()
    except NotCompiled:
        return False
    return True


def packed(weight_OI: Tensor) -> Tensor:
    """As the kernel reads it, ``[O/32, I/2, 32, 2]``, filled up with zeros; I is even."""
    outputs, inputs = weight_OI.shape
    padded_OI = F.pad(weight_OI, (0, 0, 0, -outputs % PANEL))
    return padded_OI.view(-1, PANEL, inputs // 2, 2).transpose(1, 2).contiguous()


class PackedLinear(nn.Module):
    """``x Wᵀ + b`` with W packed; takes the place of a linear layer that no longer changes."""

    packed: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_buffer("packed", packed(layer.weight.detach()), persistent=False)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().float(), persistent=False)

    @staticmethod
    def takes(layer: nn.Module) -> bool:
        """Whether it is a plain layer of such weights on the CPU."""
        return type(layer) is nn.Linear and layer.weight.dtype == torch.bfloat16 and layer.weight.is_cpu and not layer.in_features % 2

    def forward(self, x_I: Tensor) -> Tensor:
        """``[…, I]`` → ``[…, O]``, in bfloat16."""
        x_I = x_I.contiguous()
        y_O = torch.empty(*x_I.shape[:-1], self.out_features, dtype=torch.bfloat16)
        bias = None if self.bias is None else self.bias.data_ptr()
        rows = x_I.numel() // self.in_features
        function()(x_I.data_ptr(), self.packed.data_ptr(), bias, y_O.data_ptr(), rows, self.in_features, self.out_features)
        return y_O

    def extra_repr(self) -> str:
        """As of the layer that it was."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
