"""Metrics as TensorBoard events."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fw.api import LoggerPlugin

if TYPE_CHECKING:
    from pytorch_lightning.loggers import Logger


class TensorBoardMetrics(LoggerPlugin):
    """TensorBoard event files in the run directory's ``tensorboard`` folder."""

    api = 1

    def build(self, run_dir: Path, run_name: str, start_step: int) -> Logger:
        """Events after ``start_step`` of an earlier attempt, even one that saved nothing, are hidden by ``purge_step``."""
        from pytorch_lightning.loggers import TensorBoardLogger

        return TensorBoardLogger(run_dir, name="", version="tensorboard", default_hp_metric=False, purge_step=start_step + 1)

    def text(self, logger: Any, name: str, text: str, step: int) -> None:
        """As it is written: TensorBoard takes it for Markdown."""
        logger.experiment.add_text(name, "".join(f"    {line}\n" for line in text.splitlines()), step)

    def picture(self, logger: Any, name: str, png: Callable[[], bytes], step: int) -> None:
        """Among the images."""
        import numpy as np
        from PIL import Image

        logger.experiment.add_image(name, np.asarray(Image.open(io.BytesIO(png())).convert("RGB")), step, dataformats="HWC")
