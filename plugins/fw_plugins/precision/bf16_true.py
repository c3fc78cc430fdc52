"""bf16_true, dtypes as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from fw.api import PrecisionPlugin, PrecisionPolicy


@dataclass
class BF16TrueConfig:
    """Where precision matters besides."""

    accumulate: Literal["bf16", "fp32"] = "bf16"
    """Dtype of gradients between their micro-batches and the step: `fp32` loses nothing of many sums, for 4 bytes per parameter."""


class BF16True(PrecisionPlugin):
    """Everything in bfloat16: 8 bytes per parameter with AdamW. Updates below 1/256 of a weight are lost to rounding."""

    api = 1
    Config = BF16TrueConfig
    config: BF16TrueConfig

    def policy(self) -> PrecisionPolicy:
        """The dtypes."""
        accumulate = torch.float32 if self.config.accumulate == "fp32" else torch.bfloat16
        return PrecisionPolicy(parameters=torch.bfloat16, compute=torch.bfloat16, reduce=torch.float32, accumulate=accumulate)
