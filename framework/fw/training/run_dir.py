"""The run directory: made, described, and never emptied of an earlier run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from fw.config import to_yaml
from fw.errors import UserError
from fw.kinds.checkpoint import Reader
from fw.recipe import Recipe

METRICS = "metrics.csv"
SUMMARY = "summary.json"
REPORT = "report.html"
CHECKPOINTS = "checkpoints"
_TRACES = ("config.resolved.yaml", METRICS, CHECKPOINTS)


def make(run_dir: Path, continues: bool) -> None:
    """Create the directory; an earlier run in it is moved aside unless this one continues it.

    Raises:
        UserError: the directory cannot be made or written.
    """
    try:
        if not continues and any((run_dir / trace).exists() for trace in _TRACES):
            if run_dir.resolve() == Path.cwd():
                raise UserError("train.run_dir: the current directory holds an earlier run; give another train.run_dir, or resume=auto")
            number = 1
            while (aside := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
                number += 1
            os.rename(run_dir, aside)
            print(f"fw: {run_dir} held an earlier run, which is now {aside}", file=sys.stderr)
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"train.run_dir: {run_dir} cannot be used: {error.strerror}; give another train.run_dir") from None


def continues(run_dir: Path, checkpoint: Reader | None) -> bool:
    """Whether a run from this checkpoint goes on in the directory it has."""
    return checkpoint is not None and checkpoint.path.resolve().is_relative_to(run_dir.resolve())


def describe(recipe: Recipe, directory: Path) -> None:
    """Write what the run was made of: the configuration unresolved and resolved, the origin of each value, plugin versions.

    ``config.yaml`` is the merged configuration with its interpolations, so that ``fw train`` takes it as it is.
    """
    (directory / "config.yaml").write_text(to_yaml(recipe.config.tree))
    (directory / "config.resolved.yaml").write_text(to_yaml(recipe.tree))
    origins = {path: str(origin) for path, origin in recipe.origins().items()}
    (directory / "origins.json").write_text(json.dumps(origins, indent=1) + "\n")
    (directory / "plugins.json").write_text(json.dumps(recipe.plugin_versions(), indent=1) + "\n")


def write(directory: Path, files: Mapping[str, str]) -> None:
    """Put texts into the run directory, by name."""
    for name, text in files.items():
        (directory / name).write_text(text)
