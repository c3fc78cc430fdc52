"""Metrics to Weights & Biases."""

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

        class Told(WandbLogger):
            """Remembers how the run ended, which its base class does not tell."""

            failed = True

            def finalize(self, status: str) -> None:
                """By Lightning's word for it."""
                self.failed = status != "success"
                super().finalize(status)

        logger = Told(name=run_name, save_dir=run_dir, project=self.config.project, offline=self.config.offline)
        _ = logger.experiment  # now, so that what is wrong is known before the first step
        return logger

    def close(self, logger: Any) -> None:
        """Else the next run of this process would go on with this one, and one that failed would be shown as finished."""
        logger.experiment.finish(exit_code=int(logger.failed))

    def text(self, logger: Any, name: str, text: str, step: int) -> None:
        """A table of one cell."""
        logger.log_text(name, columns=["text"], data=[[text]])

    def picture(self, logger: Any, name: str, png: Callable[[], bytes], step: int) -> None:
        """Among the media."""
        from PIL import Image

        logger.log_image(name, [Image.open(io.BytesIO(png()))])
