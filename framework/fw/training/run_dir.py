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
from fw.meter.document import MemoryDocument
from fw.place import Place
from fw.recipe import Recipe

METRICS = "metrics.csv"
SUMMARY = "summary.json"
REPORT = "report.html"
MEMORY = "memory.json"
"""The measured memory of all ranks, as :mod:`fw.meter.document` has it."""
MEMORY_DETAIL = "memory-detail.json"
"""One step more closely, as :mod:`fw.meter.detail` has it; where steps were measured, beside that."""
TIME = "step-time.json"
"""Where the time goes, as :mod:`fw.meter.step_time` has it."""
TRACE = "trace"
"""Directory of what a traced step writes."""
PLAN = "plan.json"
"""What the run was predicted to take, as :mod:`fw.meter.document` has it; where it was planned."""
FIT = "fit.json"
"""What was chosen for a budget."""
CHECKPOINTS = "checkpoints"
_PROBE = ".writable"
_TRACES = ("config.resolved.yaml", METRICS, CHECKPOINTS)


def make(run_dir: Path, continues: bool, files: Mapping[str, str]) -> None:
    """Create the directory with these files, names and texts; an earlier run in it is moved aside unless this one continues it.

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
        for name, text in files.items():
            (run_dir / name).write_text(text)
    except OSError as error:
        raise UserError(f"train.run_dir: {run_dir} cannot be used: {error.strerror}; give another train.run_dir") from None


def planned(run_dir: Path) -> MemoryDocument | None:
    """What was predicted; None where nobody did."""
    try:
        return MemoryDocument.from_json(json.loads((run_dir / PLAN).read_text()))
    except FileNotFoundError:
        return None


def continues(recipe: Recipe, checkpoint: Reader | None) -> bool:
    """Whether a run from this checkpoint goes on in the directory it has."""
    if checkpoint is None:
        return False
    path = checkpoint.place.local
    return is_among(recipe.checkpoints, checkpoint.place) or (path is not None and path.resolve().is_relative_to(recipe.run_dir.resolve()))


def is_among(directory: Place, step: Place) -> bool:
    """Whether a step is one of a directory of checkpoints."""
    if directory.local is not None and step.local is not None:
        return step.local.resolve().parent == directory.local.resolve()
    return str(directory / step.name) == str(step)


def make_room(recipe: Recipe, checkpoint: Reader | None) -> None:
    """Make sure that the run's checkpoints have a place of their own, and clear what interrupted saves left there. Before any is written.

    Raises:
        UserError: the place holds the checkpoints of another run, or cannot be used.
    """
    directory, plugin = recipe.checkpoints, recipe.checkpoint
    where = f"{recipe.config.origin(('checkpoint', 'to'))}: checkpoint.to"
    own = checkpoint is not None and is_among(directory, checkpoint.place)
    try:
        if plugin.config.to and not own and (found := plugin.found(directory)):
            what = f"{directory} holds another run's checkpoints (the newest is {found[0]})"
            raise UserError(f"{where}: {what}; resume=auto goes on with them, else give another place")
        plugin.clean(directory)
        if recipe.train.save_every:
            directory.make()
            directory.write(_PROBE, b"")  # better now than after the first hours
            directory.remove(_PROBE)
    except OSError as error:
        raise UserError(f"{where}: {directory} cannot be written: {error.strerror or error}") from None


def describe(recipe: Recipe, directory: Path) -> None:
    """Write what the run was made of: the configuration unresolved and resolved, the origin of each value, plugin versions.

    ``config.yaml`` is the merged configuration with its interpolations, so that ``fw train`` takes it as it is.
    """
    (directory / "config.yaml").write_text(to_yaml(recipe.config.tree))
    (directory / "config.resolved.yaml").write_text(to_yaml(recipe.tree))
    origins = {".".join(path): str(origin) for path, origin in recipe.origins().items()}
    (directory / "origins.json").write_text(json.dumps(origins, indent=1) + "\n")
    (directory / "plugins.json").write_text(json.dumps(recipe.plugin_versions(), indent=1) + "\n")


def write(directory: Path, files: Mapping[str, str]) -> None:
    """Put texts into the run directory, by name."""
    for name, text in files.items():
        (directory / name).write_text(text)
