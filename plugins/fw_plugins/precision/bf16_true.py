"""bf16_true, dtypes as data."""

from __future__ import annotations

import torch

from fw.kinds.precision import PrecisionPlugin, PrecisionPolicy


class BF16True(PrecisionPlugin):
    """Everything in bfloat16: 8 bytes per parameter with AdamW. Updates below 1/256 of a weight are lost to rounding."""

    api = 1

    def policy(self) -> PrecisionPolicy:
        """The dtypes."""
        return PrecisionPolicy(parameters=torch.bfloat16, compute=torch.bfloat16, reduce=torch.float32)
