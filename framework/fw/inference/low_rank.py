"""Low-rank changes of layers that no longer change, by kernels where these take them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fw.kernels.linear import PackedLinear, available, layer_of, takes
from fw.kinds.peft import LowRankChange


class Change(nn.Module):
    """``s · B A x``.

    Args:
        change: of any rank; kernels are given an even one, the same but for zeros.
    """

    def __init__(self, change: LowRankChange, device: torch.device) -> None:
        super().__init__()
        odd = len(change.down_RI) % 2
        self.down = _layer(F.pad(change.down_RI, (0, 0, 0, odd)), device)
        self.up = _layer(F.pad(change.up_OR, (0, odd)), device)
        self._scale = change.scale

    def forward(self, x_I: Tensor) -> Tensor:
        """``[…, I]`` → ``[…, O]``."""
        out_O: Tensor = self.up(self.down(x_I))
        # Rounded here: a sum with a factor in it (alpha) is of other instructions at a tensor's end, to other last bits.
        return out_O.mul_(self._scale)


class ChangedLinear(nn.Module):
    """``W x + b + s · B A x``, both products by kernels.

    Args:
        layer: W and b, packed.
    """

    def __init__(self, layer: PackedLinear, change: LowRankChange) -> None:
        super().__init__()
        self.layer, self.change = layer, Change(change, torch.device("cpu"))
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def forward(self, x_I: Tensor) -> Tensor:
        """``[…, I]`` → ``[…, O]``."""
        out_O: Tensor = self.layer(x_I)
        return out_O.add_(self.change(x_I))


def _layer(weight_OI: Tensor, device: torch.device) -> nn.Module:
    layer = layer_of(weight_OI.to(device))
    return PackedLinear(layer) if takes(layer) and available() else layer
