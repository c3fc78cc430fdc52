"""Metrics as TensorBoard events."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fw.api import LoggerPlugin

if TYPE_CHECKING:
    from pytorch_lightning.loggers import Logger


class TensorBoardMetrics(LoggerPlugin):
    """TensorBoard event files in the run directory's ``tensorboard`` folder."""

    api = 1

    def build(self, run_dir: Path, run_name: str, start_step: int) -> Logger:
        """Events after ``start_step`` of an earlier attempt, even one that saved nothing, are hidden by ``purge_step``."""
        from pytorch_lightning.loggers import TensorBoardLogger

        return TensorBoardLogger(run_dir, name="", version="tensorboard", purge_step=start_step + 1)
