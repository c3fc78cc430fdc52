"""AdamW with 8-bit moments in pages."""

from __future__ import annotations

from dataclasses import replace

import torch

from fw.api import OffloadPolicy, OptimizerSpec
from fw_plugins.optimizer import paged
from fw_plugins.optimizer.adamw_8bit import AdamW8bit, AdamW8bitConfig, AdamW8bitUpdate


class PagedAdamW8bitUpdate(paged.Paged, AdamW8bitUpdate):
    """The update of ``adamw_8bit``."""


class PagedAdamW8bit(AdamW8bit):
    """adamw_8bit with its state in pages, which leave a full GPU for host memory (https://arxiv.org/abs/2305.14314)."""

    api = 1
    Config = AdamW8bitConfig

    def check(self, device_type: str, offload: OffloadPolicy) -> None:
        """Pages need bitsandbytes, and state that is on the device."""
        paged.check("paged_adamw_8bit", "adamw_8bit", device_type, offload)

    def spec(self, device: torch.device) -> OptimizerSpec:
        """As that of adamw_8bit."""
        return replace(super().spec(device), cls=PagedAdamW8bitUpdate, note=paged.note("paged_adamw_8bit", "adamw_8bit", device))
