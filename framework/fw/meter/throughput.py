"""Time spent training, with validation and saving left out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Rate(NamedTuple):
    """Per second, of all ranks together."""

    tokens: float
    flops: float


class Throughput:
    """Counts steps, tokens, the model's FLOPs for them, and the seconds they took.

    A run's first step warms up: it counts in its own lap, not in the run's rate.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = 0
        self.flops = 0.0
        self.seconds = 0.0
        self._started: float | None = None
        self._warm = False
        self._paused = 0.0
        self._lap_tokens = 0
        self._lap_flops = 0.0
        self._lap_seconds = 0.0

    def start(self) -> None:
        """The first step begins."""
        self._started = time.perf_counter()

    def step(self, tokens: int, flops: float) -> None:
        """A step of ``tokens``, for which the model needs ``flops``, has ended, and the next begins."""
        now = time.perf_counter()
        assert self._started is not None, "start() comes first"
        self._lap_tokens += tokens
        self._lap_flops += flops
        self._lap_seconds += now - self._started
        if self._warm:
            self.steps += 1
            self.tokens += tokens
            self.flops += flops
            self.seconds += now - self._started
        self._warm = True
        self._started = now

    def leave_out(self) -> None:
        """The step that has ended counts in no rate, and the next begins."""
        self._warm = True
        self._started = time.perf_counter()

    def lap(self) -> Rate:
        """Since the last call."""
        rate = _rate(self._lap_tokens, self._lap_flops, self._lap_seconds)
        self._lap_tokens, self._lap_flops, self._lap_seconds = 0, 0.0, 0.0
        return rate

    @property
    def step_time(self) -> float | None:
        """Seconds per step over the whole run; None where none counts."""
        return self.seconds / self.steps if self.steps else None

    @property
    def rate(self) -> Rate:
        """Over the whole run."""
        return _rate(self.tokens, self.flops, self.seconds)

    def pause(self) -> None:
        """What follows is no training time."""
        self._paused = time.perf_counter()

    def resume(self) -> None:
        """Training goes on."""
        if self._started is not None:
            self._started += time.perf_counter() - self._paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is no training time."""
        self.pause()
        try:
            yield
        finally:
            self.resume()


def _rate(tokens: int, flops: float, seconds: float) -> Rate:
    return Rate(tokens / seconds, flops / seconds) if seconds else Rate(0.0, 0.0)
