"""Virtual tokens before a sequence (Lester et al. 2021, https://arxiv.org/abs/2104.08691)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fw_models.layers.prefix import segments_with


class Prompted(NamedTuple):
    """A sequence with P virtual tokens before it: ``[B, P + L, …]``."""

    x_BLD: Tensor
    positions_BL: Tensor
    segments_BL: Tensor | None


def prepend(prompt_PD: Tensor, x_BLD: Tensor, positions_BL: Tensor, segments_BL: Tensor | None) -> Prompted:
    """The sequence's own positions follow those of the virtual tokens, which belong to the document that each row begins with."""
    count = len(prompt_PD)
    x_BLD = torch.cat([prompt_PD.to(x_BLD.dtype).expand(len(x_BLD), -1, -1), x_BLD], 1)
    first_BP = torch.arange(count, device=positions_BL.device).expand(len(positions_BL), -1)
    positions_BL = torch.cat([first_BP, positions_BL + count], 1)
    return Prompted(x_BLD, positions_BL, segments_with(count, segments_BL))
