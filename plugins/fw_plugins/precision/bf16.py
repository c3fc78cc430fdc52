"""bf16, dtypes as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from fw.kinds.precision import PrecisionPlugin, PrecisionPolicy


@dataclass
class BF16Config:
    """Where precision matters besides."""

    accumulate: Literal["fp32", "bf16"] = "fp32"
    """Dtype of gradients between their micro-batches and the step: `bf16` takes half the bytes, and rounds each sum to 8 bits."""


class BF16(PrecisionPlugin):
    """Matrix products in bfloat16; weights, optimizer and gradient sums in fp32. About half the activation bytes of fp32."""

    api = 1
    Config = BF16Config
    config: BF16Config

    def policy(self) -> PrecisionPolicy:
        """The dtypes."""
        accumulate = torch.bfloat16 if self.config.accumulate == "bf16" else torch.float32
        return PrecisionPolicy(parameters=torch.float32, compute=torch.bfloat16, reduce=torch.float32, accumulate=accumulate)
