"""Warm-up, stable, decay."""

from __future__ import annotations

from dataclasses import dataclass

from fw.api import Decay, SchedulePlugin, UserError


@dataclass
class WSDConfig(Decay):
    """Constant for most of the run, then a linear decay."""

    decay_fraction: float = 0.2
    """Share of all steps that the decay at the end takes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.decay_fraction <= 1:
            raise UserError(f"schedule.decay_fraction: {self.decay_fraction} is not in (0, 1]")


class WarmupStableDecay(SchedulePlugin):
    """Linear warm-up, a constant stretch, then a line down to ``final`` (MiniCPM, https://arxiv.org/abs/2404.06395)."""

    api = 1
    Config = WSDConfig
    config: WSDConfig

    def factor(self, step: int, total_steps: int) -> float:
        """Warm-up, 1, then linear in the step; the last of all steps has ``final``."""
        total = self.config.total_steps or total_steps
        decay_steps = max(1, round(total * self.config.decay_fraction))
        done = min(1.0, max(0.0, (step + 1 - (total - decay_steps)) / decay_steps))
        return self.config.warmup(step) * (1 - (1 - self.config.final) * done)
