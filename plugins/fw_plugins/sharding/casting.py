"""What autocast can cast to, for shardings that leave the compute dtype to it."""

from __future__ import annotations

import torch

from fw.errors import UserError
from fw.kinds.sharding import StepSpec


def check(spec: StepSpec) -> None:
    """Refuse parameters in fewer bits than are computed in: autocast knows 16-bit dtypes only.

    Raises:
        UserError: with what would work.
    """
    if spec.precision.parameters != torch.float32 and torch.float32 in spec.computes_in:
        raise UserError(
            "precision.phases: compute fp32 from parameters in bf16 is nothing torch's autocast does, which casts to 16 bits only; use"
            " precision.parameters=fp32, or sharding=fsdp, which casts what it gathers"
        )
