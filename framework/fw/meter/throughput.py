"""Time spent training, with validation and saving left out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Throughput:
    """Counts tokens and the seconds they took. A run's first step warms up: it counts in its own lap, not in the run's rate."""

    def __init__(self) -> None:
        self.tokens = 0
        self.seconds = 0.0
        self._started: float | None = None
        self._warm = False
        self._paused = 0.0
        self._lap_tokens = 0
        self._lap_seconds = 0.0

    def start(self) -> None:
        """The first step begins."""
        self._started = time.perf_counter()

    def step(self, tokens: int) -> None:
        """A step of ``tokens`` has ended, and the next begins."""
        now = time.perf_counter()
        assert self._started is not None, "start() comes first"
        self._lap_tokens += tokens
        self._lap_seconds += now - self._started
        if self._warm:
            self.tokens += tokens
            self.seconds += now - self._started
        self._warm = True
        self._started = now

    def leave_out(self) -> None:
        """The step that has ended counts in no rate, and the next begins."""
        self._started = time.perf_counter()

    def lap(self) -> float:
        """Tokens per second since the last call."""
        rate = self._lap_tokens / self._lap_seconds if self._lap_seconds else 0.0
        self._lap_tokens, self._lap_seconds = 0, 0.0
        return rate

    @property
    def rate(self) -> float:
        """Tokens per second over the whole run."""
        return self.tokens / self.seconds if self.seconds else 0.0

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
