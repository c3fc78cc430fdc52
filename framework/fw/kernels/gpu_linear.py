"""Linear layers that are given the same x, as one product on a GPU, which reads more of memory at once than several small ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fw.planned import on_gpu


def takes(layers: Sequence[nn.Module | None]) -> bool:
    """Whether they are plain ones on a GPU, alike in what they are given and in whether they have a bias."""
    plain = [layer for layer in layers if type(layer) is nn.Linear and on_gpu(layer.weight) and layer.weight.is_floating_point()]
    kinds = {(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in plain}
    return len(plain) == len(layers) > 1 and len(kinds) == 1


class _Part(nn.Linear):
    """One of them; what it gives is a part of what was computed for all."""

    product: _Product

    def forward(self, x_I: Tensor) -> Tensor:
        """``[…, I]`` → ``[…, O]``."""
        return self.product.compute(self, x_I)


class _Product:
    def __init__(self, layers: Sequence[_Part], weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._layers, self._weight_OI, self._bias_O = layers, weight_OI, bias_O
        self._sizes = [layer.out_features for layer in layers]
        self._of: Tensor | None = None
        self._found: dict[_Part, Tensor] = {}

    def compute(self, layer: _Part, x_I: Tensor) -> Tensor:
        if self._of is not x_I or layer not in self._found:
            y_O = F.linear(x_I, self._weight_OI, self._bias_O)
            self._of, self._found = x_I, dict(zip(self._layers, y_O.split(self._sizes, -1), strict=True))
        found_O = self._found.pop(layer)
        if not self._found:
            self._of = None
        return found_O


def joined(layers: Sequence[nn.Linear]) -> Sequence[nn.Linear]:
    """These, computed together by whichever is asked first; one thread uses them. Their weights are parts of one."""
    weight_OI = torch.cat([layer.weight.detach() for layer in layers])
    bias_O = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
    parts, begin = [], 0
    for layer in layers:
        rows = slice(begin, begin := begin + layer.out_features)
        part = _Part(layer.in_features, layer.out_features, bias=False, device="meta")
        part.weight = nn.Parameter(weight_OI[rows], requires_grad=False)
        part.bias = None if bias_O is None else nn.Parameter(bias_O[rows], requires_grad=False)
        parts.append(part)
    product = _Product(parts, weight_OI, bias_O)
    for part in parts:
        part.product = product
    return parts
