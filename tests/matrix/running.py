"""A row of the matrix as a run: trained, saved and resumed, or generating."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml

from conftest import column, environment, own_cache
from matrix.covering import Level
from matrix.levels import config, generating

_SECONDS = 300
_REFUSED = 2
_MOST = 4
_PLACE = re.compile(r"^(\[rank\d+\]:)?\s*fw: error: (rank \d+ failed: )?(([\w./-]+\.yaml(:\d+)?|override \S+): )?")


@dataclass(frozen=True)
class Outcome:
    """What came of it.

    Attributes:
        code: exit code of the run that ended last.
        sentence: of its error, without the place in the config.
        told: all that was printed.
    """

    code: int
    sentence: str
    told: str

    @property
    def refused(self) -> bool:
        """As something that cannot be, and with a sentence."""
        return self.code == _REFUSED and bool(self.sentence)


Run = Callable[[Mapping[str, str], Path, Path], Outcome]
"""A row, the directory that :func:`matrix.levels.prepare` has filled, and an empty one, to what came of it."""


def train(row: Mapping[str, str], files: Path, place: Path) -> Outcome:
    """Two steps with a checkpoint, and a third one from there."""
    _begin(files, place, config(row))
    told = ""
    for words in ([], ["train.max_steps=3", "train.save_every=3", "resume=auto"]):
        outcome = _fw(files, place, "train", "row.yaml", *words)
        told += outcome.told
        if outcome.code:
            return Outcome(outcome.code, outcome.sentence, told)
    if row.get("logger", "csv") == "csv":
        losses = column(place / "run", "loss")
        assert len(losses) == 3 and all(map(math.isfinite, losses)), f"losses {losses}\n{told}"
    return Outcome(0, "", told)


def generate(row: Mapping[str, str], files: Path, place: Path) -> Outcome:
    """A few tokens."""
    tree = generating(row)
    _begin(files, place, tree)
    words = [f"{key}={json.dumps(value)}" for key, value in tree.items()]
    return _fw(files, place, "generate", f"model-{row.get('model', 'llama')}", "w5 w9", "--max-tokens", "6", *words)


def _begin(files: Path, place: Path, tree: Mapping[str, Any]) -> None:
    for file in files.iterdir():
        (place / file.name).symlink_to(file)
    (place / "row.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))


def _fw(files: Path, place: Path, *words: str) -> Outcome:
    ended = subprocess.run(
        [sys.executable, "-m", "fw", *words],
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**environment(), "OMP_NUM_THREADS": "1", "FW_CACHE": own_cache(files.parent / "cache")},
        timeout=_SECONDS,
        check=False,
    )
    errors = [line for line in ended.stdout.splitlines() if "fw: error: " in line]
    return Outcome(ended.returncode, _PLACE.sub("", errors[-1]) if ended.returncode and errors else "", ended.stdout)


def reason(
    run: Run, row: Mapping[str, str], outcome: Outcome, files: Path, place: Path, known: Collection[frozenset[Level]]
) -> frozenset[Level]:
    """The least of a refused row that is refused with the same sentence: of one level, usual ones stand beside it.

    Three that the sentence has words of are tried first, then all of the row; what can be left out of them is.
    """
    words = set(re.findall(r"[a-z_0-9]+", outcome.sentence.lower()))

    def mentioned(some: tuple[Level, ...]) -> int:
        said = [word for part, name in some for word in (part, *re.findall(r"[a-z_0-9]+", name.lower()))]
        return -sum(word in words for word in said)

    def refused(some: Collection[Level]) -> bool:
        return run(dict(some), files, Path(tempfile.mkdtemp(dir=place))).sentence == outcome.sentence

    def least(levels: list[Level]) -> frozenset[Level]:
        """Without whatever can be left out, what is not mentioned first."""
        for level in sorted(levels, key=lambda level: -mentioned((level,))):
            rest = [other for other in levels if other != level]
            if rest and frozenset(rest) not in known and refused(rest):
                levels = rest
        return frozenset(levels)

    first = sorted(combinations(row.items(), 3), key=mentioned)[: 2 * cores()]
    with ThreadPoolExecutor(cores()) as pool:
        found = [list(of) for of, same in zip(first, pool.map(refused, first), strict=True) if same]
    of = least(found[0] if found else list(row.items()))
    if len(of) > _MOST:
        raise AssertionError(f"only so much together is refused: {sorted(of)}\n{outcome.sentence}")
    return of


def cores() -> int:
    """That rows may take, each one."""
    return max(1, len(os.sched_getaffinity(0)))
