"""``fw train``: from a config to a finished run, on this rank or by starting the ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fw.config import Config
from fw.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from fw.launching import outcome
from fw.launching.network import use_interface
from fw.recipe import Recipe, World, current_world, resolve
from fw.training import environment, run_dir
from fw.training.attempts import Attempts
from fw.training.inputs import check_input, device_of, say
from fw.training.notebook import framed, plain

_TOLD = {"steps": "steps", "train_loss": "loss", "val_loss": "validation loss", "tokens_per_s": "tokens/s"}
"""Of a run's summary."""


@dataclass(frozen=True)
class TrainResult:
    """How a run ended; in a notebook, its report.

    Attributes:
        summary: what ``summary.json`` holds; empty where the run did not come that far.
    """

    exit_code: int
    run_dir: Path
    summary: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        figures = [f"{word} {self.summary[key]:,.5g}" for key, word in _TOLD.items() if self.summary.get(key) is not None]
        return f"{self.run_dir}: {', '.join(figures) if figures else f'ended with exit code {self.exit_code}'}"

    def _repr_html_(self) -> str:
        report = self.run_dir / run_dir.REPORT
        return framed(report.read_text()) if self.summary and report.is_file() else plain(repr(self))


def run(config: Config, files: Mapping[str, str] | None = None) -> TrainResult:
    """Train what a config describes.

    Args:
        files: names and texts, for the run's directory.

    Raises:
        UserError: the config is wrong.
        RunError: the run failed.
    """
    world = current_world()
    recipe = resolve(config, world)
    if not world.is_first or outcome.launched_by_fw():
        return _run(config, recipe, world, files or {})
    before = environment.last_start(recipe.run_dir)
    try:
        result = _run(config, recipe, world, files or {})
    except KeyboardInterrupt:
        environment.note_end(recipe.run_dir, before, EXIT_INTERRUPTED)
        raise
    except Exception as error:
        environment.note_end(recipe.run_dir, before, getattr(error, "exit_code", EXIT_FAILED), outcome.describe(error))
        raise
    environment.note_end(recipe.run_dir, before, result.exit_code)
    return result


def _run(config: Config, recipe: Recipe, world: World, files: Mapping[str, str]) -> TrainResult:
    if not world.launched and (recipe.world_size > 1 or recipe.launch.max_restarts):
        return _launch(recipe, [str(f) for f in config.files[-1:]], config.overrides, files)
    from fw.training.rank import train_rank  # with Lightning, which a process that only starts ranks can do without

    code, summary = train_rank(recipe, world, files)
    return TrainResult(code, recipe.run_dir, summary)


def _launch(recipe: Recipe, configs: Sequence[str], overrides: Sequence[str], files: Mapping[str, str]) -> TrainResult:
    """Start the ranks. What can be wrong is found here first, where it is said once, and the slow preparation is done once."""
    device = device_of(recipe, World(local_size=recipe.launch.devices))
    use_interface(recipe.launch, False, recipe.config.origin(("launch", "interface")), {})  # only checked: the ranks use it
    with Attempts(recipe, check_input(recipe, device), say, files) as attempts:
        recipe.sharding.prepare(recipe.step_spec(device), say)
        command = [sys.executable, "-m", "fw", "train", *configs, *overrides]
        code = recipe.launcher.launch(command, recipe.launch, attempts.prepare)
    summary_file = recipe.run_dir / run_dir.SUMMARY
    summary = json.loads(summary_file.read_text()) if code == EXIT_OK and summary_file.is_file() else {}
    return TrainResult(code, recipe.run_dir, summary)
