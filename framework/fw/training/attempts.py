"""What the launching process settles before the ranks start, the first time and after a failure: directory, logs, checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

from fw.errors import RunError, UserError
from fw.kinds.checkpoint import Reader
from fw.launching.outcome import RESUME_FROM
from fw.launching.rank_log import LOG_DIR
from fw.recipe import Recipe
from fw.training import run_dir


class Attempts:
    """The attempts at one run, of which each but the first goes on where the last one left off.

    Args:
        start: the checkpoint the run begins from, if any.
    """

    def __init__(self, recipe: Recipe, start: Reader | None) -> None:
        self._recipe = recipe
        self._start = start
        self._checkpoints = recipe.run_dir / run_dir.CHECKPOINTS
        self._older: set[tuple[str, int]] = set()

    def prepare(self, attempt: int) -> dict[str, str]:
        """Make the run directory and the attempt's log directory; returns environment variables for the ranks.

        Raises:
            UserError: the run directory cannot be used.
            RunError: the checkpoint to go on from is damaged.
        """
        directory = self._recipe.run_dir
        if attempt == 0:
            run_dir.make(directory, continues=run_dir.continues(directory, self._start))
            self._older = self._found()
        checkpoint = self._newest() if attempt else None
        if checkpoint is None and self._start is not None:
            checkpoint = self._start.path.absolute()
        if attempt:
            where = f"from {checkpoint or 'the beginning'}: attempt {attempt + 1} of {self._recipe.launch.max_restarts + 1}"
            print(f"fw: starting the ranks again {where}", file=sys.stderr)
        return {LOG_DIR: str(_new_log_dir(directory)), RESUME_FROM: str(checkpoint or "")}

    def _newest(self) -> Path | None:
        """The newest whole checkpoint that this run has written, verified; those of before it are another future's."""
        plugin = self._recipe.checkpoint
        path = plugin.latest(self._checkpoints)
        if path is None or _mark(path) in self._older:
            return None
        try:
            plugin.open(path).verify()
        except UserError as error:
            raise RunError(f"the run cannot go on by itself: {error}") from None
        return path.absolute()

    def _found(self) -> set[tuple[str, int]]:
        return {_mark(path) for path in self._checkpoints.glob("*") if path.is_dir() and not path.is_symlink()}


def _mark(path: Path) -> tuple[str, int]:
    """Tells a checkpoint from another one of the same name."""
    return path.name, path.stat().st_ctime_ns


def _new_log_dir(directory: Path) -> Path:
    """``logs/attempt-N``, after those of earlier attempts and launches; ranks write into it wherever they run."""
    logs = directory / "logs"
    numbers = [int(name) for found in logs.glob("attempt-*") if (name := found.name.removeprefix("attempt-")).isdecimal()]
    made = logs / f"attempt-{max(numbers, default=-1) + 1}"
    try:
        made.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"train.run_dir: {made} cannot be made: {error.strerror}; give another train.run_dir") from None
    return made
