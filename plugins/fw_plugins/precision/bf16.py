"""bf16, dtypes as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from fw.api import PrecisionPlugin, PrecisionPolicy


@dataclass
class BF16Config:
    """Where precision matters besides."""

    accumulate: Literal["fp32", "bf16"] = "fp32"
    """Dtype of gradients between their micro-batches and the step: `bf16` takes half the bytes, and rounds each sum to 8 bits."""
    full_eval: bool = False
    """Validate and sample on weights converted to bf16 once, without autocast: activations between layers take half the bytes. On a GPU
    the fp32 weights wait in host memory meanwhile, 4 bytes per parameter. `fsdp` and `zero` do not differ by it."""


class BF16(PrecisionPlugin):
    """Matrix products in bfloat16; weights, optimizer and gradient sums in fp32. About half the activation bytes of fp32."""

    api = 1
    Config = BF16Config
    config: BF16Config

    def policy(self) -> PrecisionPolicy:
        """The dtypes."""
        accumulate = torch.bfloat16 if self.config.accumulate == "bf16" else torch.float32
        return PrecisionPolicy(torch.float32, torch.bfloat16, torch.float32, accumulate=accumulate, full_eval=self.config.full_eval)
