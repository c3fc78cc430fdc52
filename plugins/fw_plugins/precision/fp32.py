"""fp32, dtypes as data."""

from __future__ import annotations

import torch

from fw.api import PrecisionPlugin, PrecisionPolicy


class FP32(PrecisionPlugin):
    """Everything in 32 bits: 16 bytes per parameter with AdamW (weight, gradient, two moments)."""

    api = 1

    def policy(self) -> PrecisionPolicy:
        """The dtypes."""
        return PrecisionPolicy(parameters=torch.float32, compute=torch.float32, reduce=torch.float32)
