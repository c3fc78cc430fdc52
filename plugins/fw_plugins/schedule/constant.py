"""A constant learning rate after a warm-up."""

from __future__ import annotations

from dataclasses import dataclass

from fw.api import SchedulePlugin, Warmup


@dataclass
class ConstantConfig(Warmup):
    """Constant after the warm-up."""


class Constant(SchedulePlugin):
    """Linear warm-up, then the optimizer's learning rate unchanged."""

    api = 1
    Config = ConstantConfig
    config: ConstantConfig

    def factor(self, step: int, total_steps: int) -> float:
        """Warm-up, then 1."""
        return self.config.warmup(step)
