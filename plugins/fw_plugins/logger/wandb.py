"""Metrics to Weights & Biases."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fw.api import LoggerPlugin

if TYPE_CHECKING:
    from pytorch_lightning.loggers import Logger


@dataclass
class WandbConfig:
    """Where the run appears."""

    project: str = "fw"
    """The project on Weights & Biases."""
    offline: bool = False
    """Keep everything in the run directory, to be sent later with `wandb sync`."""


class WandbMetrics(LoggerPlugin):
    """Weights & Biases, online or offline."""

    api = 1
    Config = WandbConfig
    packages = {"wandb": "fw[wandb]"}  # noqa: RUF012
    config: WandbConfig

    def build(self, run_dir: Path, run_name: str, start_step: int) -> Logger:
        """A run named like the config, files below ``run_dir``."""
        from pytorch_lightning.loggers import WandbLogger

        return WandbLogger(name=run_name, save_dir=run_dir, project=self.config.project, offline=self.config.offline)
