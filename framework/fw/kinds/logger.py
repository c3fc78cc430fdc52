"""The contract of ``logger``: where metrics go. Several may be named; each is one of Lightning's loggers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from fw.registry import Plugin

if TYPE_CHECKING:
    from pytorch_lightning.loggers import Logger

COLUMNS = ("step", "tokens", "loss", "grad_norm", "lr", "tokens_per_s", "mfu", "peak_memory_bytes", "val_loss")
"""The metrics of every run's rows, all but ``step`` optional: full-precision floats and integers. Some rows have more."""


class LoggerPlugin(Plugin):
    """Builds a logger on the first rank only."""

    kind: ClassVar[str] = "logger"

    @abstractmethod
    def build(self, run_dir: Path, run_name: str, start_step: int) -> Logger:
        """The logger. ``run_dir`` exists; in a resumed run, metrics after ``start_step`` are from a future that will not happen.

        What it raises but a :class:`fw.errors.UserError`, here or while it logs, is said, and the run goes on without it.
        """

    def close(self, logger: Logger) -> None:
        """The run is over, and the logger has been told. Here: nothing."""

    def text(self, logger: Logger, name: str, text: str, step: int) -> None:
        """Show a text: the config (YAML) when a run begins, a sample when it ends. Here: nothing."""

    def picture(self, logger: Logger, name: str, png: Callable[[], bytes], step: int) -> None:
        """Show a picture, which ``png`` makes: memory over a step that was measured. Here: nothing."""
