"""Runs as their directories tell of them: state, last figures, whether the newest checkpoint is whole."""

from __future__ import annotations

import csv
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from fw.checkpointing import commit
from fw.checkpointing.manifest import MANIFEST, damages, read_manifest
from fw.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REQUEUE, EXIT_USER, UserError
from fw.place import Place, place
from fw.training.environment import last_end
from fw.training.run_dir import CHECKPOINTS, METRICS, SUMMARY
from fw.training.same_run import holder_is_gone, lock_of

CONFIG = "config.resolved.yaml"
_TAIL_BYTES = 1 << 16
_DEPTH = 3
"""How far below a directory runs are looked for."""
State = Literal["running", "finished", "stopped", "failed", "not finished"]

_ENDED: dict[int, State] = {EXIT_FAILED: "failed", EXIT_USER: "failed", EXIT_REQUEUE: "stopped", EXIT_INTERRUPTED: "stopped"}
"""By the exit code of the last start."""


@dataclass(frozen=True)
class Newest:
    """The checkpoint that a run would go on from.

    Attributes:
        problems: what is missing of it, or has another size than was written, a sentence each; where all was read, what has other bytes.
    """

    place: str
    step: int | None
    size_bytes: int
    problems: Sequence[str]


@dataclass(frozen=True)
class PastRun:
    """A run that somebody began.

    Attributes:
        state: running, where a process holds the directory; finished, where it has made all its steps and has been summed up; stopped,
            where it was asked to and has ended in order; failed, where it said why; not finished, where nobody was there to say so.
        said: why it failed; empty where it did not.
        step: that its metrics, its summary or its newest checkpoint tell of; None where none of them is there.
        changed: seconds since 1970, of what was last written.
    """

    directory: Path
    state: State
    step: int | None
    max_steps: int | None
    loss: float | None
    val_loss: float | None
    tokens_per_s: float | None
    checkpoint: Newest | None
    changed: float
    said: str = ""


def past_runs(roots: Sequence[Path], thorough: bool = False, progress: Callable[[int], object] = lambda count: None) -> list[PastRun]:
    """Of all runs in these directories, the one that was written to last first.

    Args:
        roots: runs themselves, or what is above them.
        thorough: read the newest checkpoints, and compare with what was written.
        progress: hears of bytes read.

    Raises:
        UserError: there is no such directory.
    """
    for root in roots:
        if not root.is_dir():
            raise UserError(f"{root}: no such directory")
    found = {directory.resolve(): directory for root in roots for directory in _below(root, _DEPTH)}
    return sorted((_told(directory, thorough, progress) for directory in found.values()), key=lambda run: -run.changed)


def _below(directory: Path, depth: int) -> Iterator[Path]:
    if (directory / CONFIG).is_file() and not (directory / MANIFEST).is_file():
        yield directory
    elif depth:
        with suppress(OSError):
            for entry in sorted(directory.iterdir()):
                if entry.is_dir() and not entry.is_symlink() and not entry.name.startswith("."):
                    yield from _below(entry, depth - 1)


def _told(directory: Path, thorough: bool, progress: Callable[[int], object]) -> PastRun:
    config = config_of(directory)
    summary, row, checkpoint = summary_of(directory), last_row(directory / METRICS), _newest(directory, config, thorough, progress)
    max_steps = config.get("train", {}).get("max_steps")
    steps = [row.get("step"), summary.get("steps"), checkpoint.step if checkpoint else None]
    step = max((int(each) for each in steps if each is not None), default=None)
    ended = summary.get("steps") is not None and max_steps is not None and summary["steps"] >= max_steps
    end = last_end(directory) or {}
    state: State = "running" if is_held(directory) else _ENDED.get(end.get("exit_code", 0), "finished" if ended else "not finished")
    changed = max(path.stat().st_mtime for path in (directory / CONFIG, directory / METRICS, directory / SUMMARY) if path.exists())
    loss = row.get("loss", summary.get("train_loss"))
    val_loss = summary.get("val_loss") if ended else _last(directory / METRICS, "val_loss")
    rate = summary.get("tokens_per_s") if ended else row.get("tokens_per_s")
    return PastRun(
        directory, state, step, max_steps, loss, val_loss, rate, checkpoint, changed, str(end.get("said", "")) if state == "failed" else ""
    )


def config_of(directory: Path) -> dict[str, Any]:
    """The run's configuration, resolved; empty where it cannot be read."""
    with suppress(OSError, yaml.YAMLError):
        found = yaml.safe_load((directory / CONFIG).read_text())
        return found if isinstance(found, dict) else {}
    return {}


def summary_of(directory: Path) -> dict[str, Any]:
    """What the run was summed up to; empty where it has not been."""
    with suppress(OSError, ValueError):
        found = json.loads((directory / SUMMARY).read_text())
        return found if isinstance(found, dict) else {}
    return {}


def last_row(metrics: Path) -> dict[str, float]:
    """Of a run's metrics, what is a number; empty where there are none. Of a long file only the end is read."""
    rows = rows_of(metrics, _TAIL_BYTES)
    return rows[-1] if rows else {}


def _last(metrics: Path, name: str) -> float | None:
    return next((row[name] for row in reversed(rows_of(metrics, _TAIL_BYTES)) if name in row), None)


def rows_of(metrics: Path, tail_bytes: int | None = None) -> list[dict[str, float]]:
    """Numbers of each row; of the last so many bytes where that is said."""
    try:
        with metrics.open("rb") as file:
            header = file.readline().decode().strip().split(",")
            first = file.tell()
            begin = first if tail_bytes is None else max(first, os.fstat(file.fileno()).st_size - tail_bytes)
            file.seek(begin)
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    if begin > first:
        lines = lines[1:]  # the first one may be half of one
    found = []
    for cells in csv.reader(lines):
        row: dict[str, float] = {}
        for name, cell in zip(header, cells, strict=False):
            with suppress(ValueError):
                row[name] = float(cell)
        if len(cells) == len(header) and "step" in row:
            found.append(row)
    return found


def _newest(directory: Path, config: dict[str, Any], thorough: bool, progress: Callable[[int], object]) -> Newest | None:
    section = config.get("checkpoint")
    where = section.get("to") if isinstance(section, dict) else None
    try:
        checkpoints = place(where or directory / CHECKPOINTS)
        names = commit.history(checkpoints) if checkpoints.local is None or checkpoints.local.is_dir() else []
    except (UserError, OSError) as error:
        return Newest(str(where or directory / CHECKPOINTS), None, 0, [str(error)])
    return _looked_at(checkpoints / names[0], thorough, progress) if names else None


def _looked_at(step: Place, thorough: bool, progress: Callable[[int], object]) -> Newest:
    try:
        manifest = read_manifest(step)
    except UserError as error:
        return Newest(str(step), None, 0, [str(error)])
    size = sum(each.size for each in manifest.files.values())
    problems = damages(step, manifest, progress=progress) if thorough else []
    if not thorough:
        for name, expected in manifest.files.items():
            if not step.has(name):
                problems.append(f"{name} is missing")
            elif (found := step.size(name)) != expected.size:
                problems.append(f"{name} has {found} bytes instead of {expected.size}")
    return Newest(str(step), manifest.facts.get("step"), size, problems)


def is_held(run_dir: Path) -> bool:
    """Whether a process of this host, or of one that shares the file system's locks, is writing a run's directory."""
    try:
        with lock_of(run_dir).open() as file:
            if holder_is_gone(file.read()):  # else a lock for a moment, which a run that begins in that moment would take for another's
                return False
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
