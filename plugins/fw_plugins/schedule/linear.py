"""A learning rate that falls in a straight line."""

from __future__ import annotations

from dataclasses import dataclass

from fw.api import Decay, SchedulePlugin


@dataclass
class LinearConfig(Decay):
    """Linear decay after the warm-up."""


class Linear(SchedulePlugin):
    """Linear warm-up, then a straight line down to ``final`` times the learning rate."""

    api = 1
    Config = LinearConfig
    config: LinearConfig

    def factor(self, step: int, total_steps: int) -> float:
        """Warm-up, then linear in the step."""
        done = self.config.progress(step, total_steps)
        return self.config.warmup(step) * (1 - (1 - self.config.final) * done)
