"""Tells the rank's watch that training goes on."""

from __future__ import annotations

from typing import Any

from pytorch_lightning.callbacks import Callback

from fw.launching.stacks import Watch


class HangWatch(Callback):
    """Arms the watch from the end of the first step on, batch by batch; not while a first validation batch may compile."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """A step is done."""
        self._watch.beat()

    def on_validation_start(self, *args: Any, **kwargs: Any) -> None:
        """What comes first may take long."""
        self._watch.rest()

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """A batch is done."""
        self._watch.beat()

    def on_validation_end(self, *args: Any, **kwargs: Any) -> None:
        """Training goes on."""
        self._watch.beat()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """The last checkpoint, the sample and the report take their time."""
        self._watch.rest()

    def on_exception(self, *args: Any, **kwargs: Any) -> None:
        """So does clearing up."""
        self._watch.rest()
