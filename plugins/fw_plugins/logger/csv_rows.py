"""A CSV file as one of Lightning's loggers."""

from __future__ import annotations

import csv
import os
from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities import rank_zero_only

from fw.api import COLUMNS


class CsvLogger(Logger):
    """Appends a row at a time, so that a killed run loses none that was written. A metric that comes later gets its column then."""

    def __init__(self, file: Path, name: str, start_step: int) -> None:
        super().__init__()
        self._name = name
        self._file = file
        self._columns = list(COLUMNS)
        rows = []
        if start_step and file.is_file():
            with file.open(newline="") as old:
                # A row cut short by a crash has no value, not even an empty one, for its last columns.
                reader = csv.DictReader(old)
                whole = [row for row in reader if row["step"] and None not in row.values()]
                rows = [row for row in whole if int(row["step"]) <= start_step]
                self._columns += [name for name in reader.fieldnames or () if name not in COLUMNS]
        self._rewrite(rows)

    @property
    def name(self) -> str:
        """The run's name."""
        return self._name

    @property
    def version(self) -> str:
        """Runs have no versions: each has its directory."""
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Append a row; columns without a value stay empty."""
        if new := [name for name in metrics if name not in self._columns]:
            with self._file.open(newline="") as file:
                rows = list(csv.DictReader(file))
            self._columns += new
            self._rewrite(rows)
        with self._file.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow({**metrics, "step": step})

    def _rewrite(self, rows: Iterable[Mapping[str, Any]]) -> None:
        aside = self._file.with_suffix(".part")
        with aside.open("w", newline="") as new:
            writer = csv.DictWriter(new, self._columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(aside, self._file)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """The run directory has the configuration already."""
