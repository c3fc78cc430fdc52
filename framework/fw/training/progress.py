"""The progress of a run on stderr: a bar on a terminal, plain lines elsewhere, nothing on other ranks than the first."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from fw.config import format_size

_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Step, loss, tokens/s, MFU, peak memory, time left."""

    def __init__(self, total_steps: int, shown: bool) -> None:
        self._total = total_steps
        self._shown = shown
        self._bar: tqdm[Any] | None = None
        self._begun = 0.0
        self._first = 0
        self._last_line = 0.0

    def start(self, step: int) -> None:
        """Training begins after ``step``."""
        self._begun, self._first = time.monotonic(), step
        if self._shown and sys.stderr.isatty():
            # A pseudo-terminal may say that it has no columns and rows, and tqdm would believe it.
            known = os.get_terminal_size(sys.stderr.fileno()).columns > 0
            width: dict[str, Any] = {"dynamic_ncols": True} if known else {"ncols": 120, "nrows": 24}
            self._bar = tqdm(total=self._total, initial=step, unit="step", file=sys.stderr, **width)

    def advance(self, step: int, row: Mapping[str, Any] | None = None) -> None:
        """``step`` is done; ``row`` has its metrics where they were taken."""
        if self._bar is not None:
            if row is not None:
                self._bar.set_postfix_str(_describe(row), refresh=False)
            self._bar.update(step - self._bar.n)
        elif self._shown and row is not None:
            now = time.monotonic()
            if now - self._last_line >= _SECONDS_BETWEEN_LINES or step in (self._first + 1, self._total):
                self._last_line = now
                left = (now - self._begun) / max(1, step - self._first) * (self._total - step)
                print(f"step {step}/{self._total}  {_describe(row)}  {_duration(left)} left", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """A line that does not break the bar."""
        if self._shown:
            tqdm.write(text, file=sys.stderr)

    def close(self) -> None:
        """The bar stays where it is."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _describe(row: Mapping[str, Any]) -> str:
    return f"loss {row['loss']:.4f}  {row['tokens_per_s']:,.0f} tok/s  MFU {row['mfu']:.1%}  peak {format_size(row['peak_memory_bytes'])}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
