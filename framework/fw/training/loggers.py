"""Loggers that cannot stop a run: one that fails says so once, and the run goes on without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger

from fw.errors import UserError, describe
from fw.kinds.data import Say
from fw.kinds.logger import LoggerPlugin

_BESIDE = "its config, texts and pictures"
"""What a logger may fail at and still log metrics."""


class Guarded(Logger):
    """Another logger. It is told that the run is over by :meth:`close`, not when Lightning is: there is more to log then.

    Attributes:
        failed: why it is not used any more, for rows of metrics and for all that is beside them; empty while it is.
    """

    def __init__(self, label: str, plugin: LoggerPlugin, inner: Logger, say: Say) -> None:
        super().__init__()
        self._label, self._plugin, self._inner, self._say = label, plugin, inner, say
        self._status = "failed"
        self.failed = {"": "", _BESIDE: ""}

    @property
    def name(self) -> str | None:
        """Its own."""
        return self._inner.name

    @property
    def version(self) -> int | str | None:
        """Its own."""
        return self._inner.version

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """A row."""
        self._do(lambda: self._inner.log_metrics(dict(metrics), step))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """What was set, by name."""
        self._do(lambda: self._inner.log_hyperparams(params), _BESIDE)

    def text(self, name: str, text: str, step: int) -> None:
        """A text, where the logger shows any."""
        self._do(lambda: self._plugin.text(self._inner, name, text, step), _BESIDE)

    def picture(self, name: str, png: Callable[[], bytes], step: int) -> None:
        """A picture, made where the logger shows any."""
        self._do(lambda: self._plugin.picture(self._inner, name, png, step), _BESIDE)

    def save(self) -> None:
        """What is not yet written."""
        self._do(self._inner.save)

    def finalize(self, status: str) -> None:
        """Lightning's word, for later."""
        self._status = status

    def close(self) -> None:
        """The run is over."""
        self._do(lambda: self._inner.finalize(self._status))
        self._do(lambda: self._plugin.close(self._inner))

    def _do(self, call: Callable[[], Any], part: str = "") -> None:
        if self.failed[part] or self.failed[""]:
            return
        try:
            call()
        except Exception as error:
            self.failed[part] = describe(error)
            without = f"logs metrics without {part}" if part else "goes on without it"
            self._say(f"warning: logger '{self._label}' failed ({self.failed[part]}); the run {without}")


def build(named: Sequence[tuple[str, LoggerPlugin]], run_dir: Path, run_name: str, start_step: int, say: Say) -> list[Guarded]:
    """Those that can be built; of others it is said.

    Raises:
        UserError: an option is wrong.
    """
    found = []
    for label, plugin in named:
        try:
            inner = plugin.build(run_dir, run_name, start_step)
        except UserError:
            raise
        except Exception as error:
            say(f"warning: logger '{label}' failed to begin ({describe(error)}); the run goes on without it")
            continue
        found.append(Guarded(label, plugin, inner, say))
    return found


def flat(tree: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Values of a nested mapping by dotted names; lists as they are written."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value if isinstance(value, bool | int | float | str) else str(value)
