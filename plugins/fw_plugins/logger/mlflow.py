"""Metrics to MLflow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fw.api import LoggerPlugin

if TYPE_CHECKING:
    from pytorch_lightning.loggers import Logger


@dataclass
class MlflowConfig:
    """Where the run appears."""

    experiment: str = "fw"
    """The experiment's name."""
    tracking_uri: str = ""
    """An MLflow server or store; empty for a SQLite file `mlflow.db` in the run directory."""


class MlflowMetrics(LoggerPlugin):
    """MLflow, on a server or in a local store."""

    api = 1
    Config = MlflowConfig
    packages = {"mlflow": "fw[mlflow]"}  # noqa: RUF012
    config: MlflowConfig

    def build(self, run_dir: Path, run_name: str, start_step: int) -> Logger:
        """A run named like the config."""
        from pytorch_lightning.loggers import MLFlowLogger

        uri = self.config.tracking_uri or f"sqlite:///{run_dir.resolve()}/mlflow.db"
        return MLFlowLogger(experiment_name=self.config.experiment, run_name=run_name, tracking_uri=uri)
