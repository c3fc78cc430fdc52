"""Small runs of `fw`, in processes of their own, and what they leave."""

from __future__ import annotations

import copy
import csv
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

TINY: dict[str, Any] = {
    "model": {
        "name": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
    },
    "data": {"name": "synthetic", "vocab_size": 128, "samples": 96},
    "optimizer": {"name": "adamw", "lr": 3e-3},
    "train": {
        "max_steps": 6,
        "global_batch_size": 4,
        "micro_batch_size": 1,
        "sequence_length": 32,
        "val_every": 0,
        "save_every": 0,
        "sample_tokens": 0,
    },
    "launch": {"accelerator": "cpu"},
    "logger": ["csv"],
}
"""A run of six steps that every machine makes in seconds."""

_PICKLES = (b"PK\x03\x04", *(b"\x80" + bytes([protocol]) for protocol in range(2, 6)))
_SECONDS = 600


def merged(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``tree`` with ``changes``, sections one by one; a section that names a plugin takes the place of the former."""
    found = copy.deepcopy(dict(tree))
    for key, value in changes.items():
        before = found.get(key)
        both = isinstance(value, Mapping) and isinstance(before, Mapping) and "name" not in value
        found[key] = merged(before, value) if both else copy.deepcopy(value)  # type: ignore[arg-type]
    return found


@dataclass(frozen=True)
class Run:
    """A finished `fw`.

    Attributes:
        code: as the command line returned it.
        told: what it printed, both streams.
        directory: of the run.
    """

    code: int
    told: str
    directory: Path

    def ok(self) -> Run:
        """Itself.

        Raises:
            AssertionError: it did not end well, with all that it printed.
        """
        assert self.code == 0, f"exit code {self.code}:\n{self.told}"
        return self

    @property
    def losses(self) -> list[float]:
        """By step."""
        return self.column("loss")

    def column(self, name: str) -> list[float]:
        """Of ``metrics.csv``, rows that have it."""
        with (self.directory / "metrics.csv").open(newline="") as file:
            return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]

    def json(self, name: str) -> dict[str, Any]:
        """A file of the run's directory."""
        found: dict[str, Any] = json.loads((self.directory / name).read_text())
        return found

    def pickles(self) -> list[str]:
        """Files that could be a pickle, or hold one, by how they begin."""
        files = [path for path in self.directory.rglob("*") if path.is_file()]
        return [str(path.relative_to(self.directory)) for path in files if _begins(path)]


def _begins(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4).startswith(_PICKLES)


class Runs:
    """Runs in a directory, each under a name.

    Args:
        tree: of the config that all begin with.
    """

    def __init__(self, directory: Path, tree: Mapping[str, Any]) -> None:
        self.directory, self.tree = directory, tree

    def config(self, name: str, changes: Mapping[str, Any]) -> Path:
        """A file that says so, whose run's directory is ``name``."""
        tree = merged(merged(self.tree, changes), {"train": {"run_dir": str(self.directory / name)}})
        path = self.directory / f"{name}.yaml"
        path.write_text(yaml.safe_dump(tree, sort_keys=False))
        return path

    def train(self, name: str, changes: Mapping[str, Any] | None = None) -> Run:
        """Train; a run of that name goes on where ``resume`` says so."""
        return self.fw("train", str(self.config(name, changes or {})), name=name)

    def fw(self, *words: str, name: str) -> Run:
        """Any command, in the directory."""
        process = subprocess.run(
            [sys.executable, "-m", "fw", *words],
            cwd=self.directory,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        return Run(process.returncode, process.stdout, self.directory / name)


def near(found: list[float], expected: list[float], tolerance: float) -> bool:
    """Whether all are, relative to what is expected."""
    if len(found) != len(expected):
        return False
    if not tolerance:
        return found == expected
    return all(math.isclose(a, b, rel_tol=tolerance, abs_tol=1e-8) for a, b in zip(found, expected, strict=True))
