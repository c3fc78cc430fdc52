"""A learning rate that falls along half a cosine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fw.api import Decay, SchedulePlugin


@dataclass
class CosineConfig(Decay):
    """Cosine decay after the warm-up."""


class Cosine(SchedulePlugin):
    """Linear warm-up, then half a cosine down to ``final`` times the learning rate (https://arxiv.org/abs/1608.03983)."""

    api = 1
    Config = CosineConfig
    config: CosineConfig

    def factor(self, step: int, total_steps: int) -> float:
        """Warm-up, then cosine in the step."""
        done = self.config.progress(step, total_steps)
        return self.config.warmup(step) * (self.config.final + (1 - self.config.final) * (1 + math.cos(math.pi * done)) / 2)
