"""GPTQ: codes chosen so that a layer's outputs change least (Frantar et al. 2022, https://arxiv.org/abs/2210.17323, algorithm 1).

Columns are rounded one after another; what rounding one changes is made up for by those that are not rounded yet, by the inverse of
H = Σ x xᵀ. Those with the largest inputs go first (section 5, "act-order"); groups stay neighbours, their scales are those of the weights
before, so that files need no order.

Shape suffixes: O features out, I features in, c columns of a stretch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fw.api import RunError
from fw_plugins.quantization.grouped import Grouped

DAMPING = 0.01
"""Of the mean of H's diagonal, added to it."""
_STRETCH = 128
"""Columns after which what is made up for reaches all that follow."""


@torch.no_grad()
def gptq(weight_OI: Tensor, gram_II: Tensor, layout: Grouped, damping: float = DAMPING) -> dict[str, Tensor]:
    """What is kept of a weight.

    Args:
        gram_II: Σ x xᵀ of the layer's inputs.

    Raises:
        RunError: H has no inverse, whatever the damping.
    """
    features = layout.features[1]
    grid = layout.grid(weight_OI, weight_OI.dtype)
    order_I = gram_II.diagonal().argsort(descending=True, stable=True)
    inverse_II = _inverse(gram_II[order_I][:, order_I].float(), damping)
    rest_OI = weight_OI.float()[:, order_I]
    codes_IO = torch.empty(features, layout.features[0], dtype=torch.uint8, device=weight_OI.device)
    places = order_I.tolist()
    for start in range(0, features, _STRETCH):
        end = min(start + _STRETCH, features)
        now_Oc, own_cc = rest_OI[:, start:end].clone(), inverse_II[start:end, start:end]
        error_Oc = torch.empty_like(now_Oc)
        for column, place in enumerate(places[start:end]):
            own = grid.of(place // layout.group)
            codes_O = own.codes(now_Oc[:, column])
            codes_IO[place] = codes_O.to(torch.uint8)
            error_Oc[:, column] = (now_Oc[:, column] - own.values(codes_O)) / own_cc[column, column]
            now_Oc[:, column + 1 :] -= error_Oc[:, column, None] * own_cc[column, None, column + 1 :]
        rest_OI[:, end:] -= error_Oc @ inverse_II[start:end, end:]
    return layout.keep(codes_IO.t(), grid)


def _inverse(gram_II: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the inverse: its rows are what algorithm 1 subtracts."""
    mean = gram_II.diagonal().mean()
    if not mean > 0:  # the layer has seen nothing but zeros
        return torch.eye(len(gram_II), device=gram_II.device)
    while damping <= 1:
        damped_II = gram_II.clone()
        damped_II.diagonal().add_(damping * mean)
        lower_II, failed = torch.linalg.cholesky_ex(damped_II)
        if not failed:
            upper_II, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower_II), upper=True)
            if not failed and bool(upper_II.isfinite().all()):
                return upper_II
        damping *= 10
    raise RunError("gptq: what a layer sees has no inverse, even with a damping of 1; use more calibration text, or --method rtn")
