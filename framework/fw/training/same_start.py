"""All ranks begin at the same step, or none does."""

from __future__ import annotations

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback

from fw.errors import RunError
from fw.training.strategy import MeshStrategy


class SameStart(Callback):
    """Each rank looks for the checkpoint itself: on a disk of its own it may find another one than its peers, or none."""

    def __init__(self, start_step: int) -> None:
        self._start_step = start_step

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Compare, as soon as there is a process group."""
        strategy = trainer.strategy
        assert isinstance(strategy, MeshStrategy)
        last, first = strategy.max_on_host([float(self._start_step), -float(self._start_step)])
        if last != -first:
            raise RunError(f"ranks begin at steps {-first:.0f} and {last:.0f}; train.run_dir must be on a file system that all hosts share")
