"""AWQ: what layers see is divided, and their weights multiplied, by numbers under which rounding the weights changes outputs least (Lin et
al. 2023, https://arxiv.org/abs/2306.00978, section 3.2). What makes their inputs is divided for good, so that the model computes the same.

Of each input the number is its root mean square to a power from 0 to 1, one for all inputs of a layer, found by trying. Its weights are not
clipped besides.

Shape suffixes: O features out, I features in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fw.kinds.model import Rescaling

_POWERS = [step / 20 for step in range(20)]
_LEAST = 1e-4

Rounded = Callable[[str, Tensor], Tensor]
"""What a weight, by the model's name, is once it is codes."""


@torch.no_grad()
def rescale(block: nn.Module, prefix: str, rescalings: Sequence[Rescaling], grams: Mapping[str, Tensor], rounded: Rounded) -> None:
    """Change a block's weights.

    Args:
        prefix: of its parameters' names in the model.
        grams: Σ x xᵀ of what layers see, by their weights' names; those without are not rounded.
    """
    for each in rescalings:
        names = [f"{prefix}.{layer}.weight" for layer in each.layers]
        if any(name not in grams for name in names):
            continue  # it would change a layer that stays as it is for nothing
        weights = {name: block.get_parameter(f"{layer}.weight") for name, layer in zip(names, each.layers, strict=True)}
        scale_I = _best(weights, grams[names[0]], rounded)
        for weight in weights.values():
            weight.data = (weight.float() * scale_I).to(weight.dtype)
        for maker, offset in each.makers.items():
            parameter = block.get_parameter(maker)
            divisor = scale_I if parameter.dim() == 1 else scale_I[:, None]
            parameter.data = ((parameter.float() + offset) / divisor - offset).to(parameter.dtype)


def _best(weights: Mapping[str, Tensor], gram_II: Tensor, rounded: Rounded) -> Tensor:
    """Of the numbers tried, those under which Σ ‖(Ŵ - W) x‖² is least; the first of equal ones."""
    size_I = gram_II.diagonal().sqrt().clamp(min=_LEAST)
    least, best_I = torch.inf, torch.ones_like(size_I)
    for power in _POWERS:
        scale_I = (size_I / size_I.mean()).pow(power).clamp(min=_LEAST)
        scale_I = scale_I / (scale_I.max() * scale_I.min()).sqrt()
        error = 0.0
        for name, weight in weights.items():
            scaled_OI = (weight.float() * scale_I).to(weight.dtype)
            change_OI = rounded(name, scaled_OI).float() / scale_I - weight.float()
            error += float(((change_OI @ gram_II) * change_OI).sum())
        if error < least:
            least, best_I = error, scale_I
    return best_I
