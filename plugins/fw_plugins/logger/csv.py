"""Metrics as a CSV file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fw.api import LoggerPlugin

if TYPE_CHECKING:
    from pytorch_lightning.loggers import Logger


class CsvMetrics(LoggerPlugin):
    """``metrics.csv`` in the run directory: a row per logged step, full precision."""

    api = 1

    def build(self, run_dir: Path, run_name: str, start_step: int) -> Logger:
        """Open the file; a resumed run goes on after ``start_step``."""
        from fw_plugins.logger.csv_rows import CsvLogger  # brings Lightning, which a process that only starts ranks can do without

        return CsvLogger(run_dir / "metrics.csv", run_name, start_step)
