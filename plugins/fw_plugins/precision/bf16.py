"""bf16, dtypes as data."""

from __future__ import annotations

import torch

from fw.kinds.precision import PrecisionPlugin, PrecisionPolicy


class BF16(PrecisionPlugin):
    """Matrix products in bfloat16; weights, optimizer and gradient sums in fp32. About half the activation bytes of fp32."""

    api = 1

    def policy(self) -> PrecisionPolicy:
        """The dtypes."""
        return PrecisionPolicy(parameters=torch.float32, compute=torch.bfloat16, reduce=torch.float32)
