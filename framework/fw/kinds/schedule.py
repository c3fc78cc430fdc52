"""The contract of ``schedule``: a pure function of the step, so that there is no state to save."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from fw.errors import UserError
from fw.registry import Plugin


@dataclass
class Warmup:
    """The warm-up that every schedule begins with."""

    warmup_steps: int = 0
    """Steps over which the learning rate rises in a straight line, the last of them at its full height."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise UserError(f"schedule.warmup_steps: {self.warmup_steps} is negative")

    def warmup(self, step: int) -> float:
        """The factor of the warm-up at ``step``, counted from 0; 1 after it."""
        return min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0


@dataclass
class Decay(Warmup):
    """Warm-up, then a decay towards ``final``."""

    final: float = 0.1
    """The factor at the end."""
    total_steps: int | None = None
    """Steps until the end of the decay; empty for train.max_steps. Set it to train a part of a longer schedule and resume later."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.final <= 1:
            raise UserError(f"schedule.final: {self.final} is not in [0, 1]")
        if self.total_steps is not None and self.total_steps < 1:
            raise UserError(f"schedule.total_steps: {self.total_steps} is too small; the least is 1")

    def progress(self, step: int, total_steps: int) -> float:
        """Share of the way from the warm-up's end to the last step, in [0, 1]."""
        last = (self.total_steps or total_steps) - 1
        return min(1.0, max(0.0, (step - self.warmup_steps) / max(1, last - self.warmup_steps)))


class SchedulePlugin(Plugin):
    """Decides the learning rate over time."""

    kind: ClassVar[str] = "schedule"

    @abstractmethod
    def factor(self, step: int, total_steps: int) -> float:
        """What the optimizer's learning rate is multiplied by at ``step``, counted from 0, of a run of ``total_steps``.

        Called on every rank, and by a plan, for any step: it must depend on nothing else.
        """
