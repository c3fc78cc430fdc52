"""fp16, dtypes as data, with loss scaling."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fw.api import LossScaling, PrecisionPlugin, PrecisionPolicy, UserError


@dataclass
class FP16Config:
    """Dynamic loss scaling, and evaluation."""

    initial_scale: float = 65536.0
    """Factor on the loss at the start, so that small gradients survive in 16 bits. No effect on memory."""
    growth_interval: int = 2000
    """Steps without overflow after which the factor doubles; at an overflow it halves and the step is skipped."""
    full_eval: bool = False
    """Validate and sample on weights converted to fp16 once, without autocast: activations between layers take half the bytes. On a GPU
    the fp32 weights wait in host memory meanwhile, 4 bytes per parameter. `fsdp` and `zero` do not differ by it."""

    def __post_init__(self) -> None:
        if self.initial_scale <= 0 or self.growth_interval < 1:
            raise UserError("precision.initial_scale must be above 0 and precision.growth_interval at least 1")


class FP16(PrecisionPlugin):
    """Matrix products in float16 with dynamic loss scaling; weights and optimizer in fp32. For GPUs without bfloat16."""

    api = 1
    Config = FP16Config
    config: FP16Config

    def policy(self) -> PrecisionPolicy:
        """The dtypes and the scaling."""
        scaling = LossScaling(self.config.initial_scale, self.config.growth_interval)
        return PrecisionPolicy(torch.float32, torch.float16, torch.float32, scaling, full_eval=self.config.full_eval)
