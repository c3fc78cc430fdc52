"""Metrics to MLflow."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fw.api import LoggerPlugin

if TYPE_CHECKING:
    from pytorch_lightning.loggers import Logger


@dataclass
class MlflowConfig:
    """Where the run appears."""

    experiment: str = "fw"
    """The experiment's name."""
    tracking_uri: str = ""
    """An MLflow server or store; empty for a SQLite file `mlflow.db` in the run directory, texts and pictures beside it."""


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
        files = None if self.config.tracking_uri else f"file://{run_dir.resolve()}/mlflow"  # else below the current directory
        logger = MLFlowLogger(experiment_name=self.config.experiment, run_name=run_name, tracking_uri=uri, artifact_location=files)
        _ = logger.run_id  # now, so that what is wrong is known before the first step
        return logger

    def text(self, logger: Any, name: str, text: str, step: int) -> None:
        """Among the run's artifacts."""
        logger.experiment.log_text(logger.run_id, text, f"{name}.txt")

    def picture(self, logger: Any, name: str, png: Callable[[], bytes], step: int) -> None:
        """Likewise."""
        from PIL import Image

        logger.experiment.log_image(logger.run_id, Image.open(io.BytesIO(png())), f"{name}.png")
