"""Loggers that cannot stop a run: one that fails says so once, and the run goes on without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger

from fw.errors import UserError, describe
from fw.kinds.data import Say
from fw.kinds.logger import LoggerPlugin


class Guarded(Logger):
    """Another logger. It is told that the run is over by :meth:`close`, not when Lightning is: there is more to log then.

    Attributes:
        failed: why it is not used any more; empty while it is.
    """

    def __init__(self, label: str, plugin: LoggerPlugin, inner: Logger, say: Say) -> None:
        super().__init__()
        self._label, self._plugin, self._inner, self._say = label, plugin, inner, say
        self._status = "failed"
        self.failed = ""

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
        self._do(lambda: self._inner.log_hyperparams(params))

    def text(self, name: str, text: str, step: int) -> None:
        """A text, where the logger shows any."""
        self._do(lambda: self._plugin.text(self._inner, name, text, step))

    def picture(self, name: str, png: Callable[[], bytes], step: int) -> None:
        """A picture, made where the logger shows any."""
        self._do(lambda: self._plugin.picture(self._inner, name, png, step))

    def save(self) -> None:
        """What is not yet written."""
        self._do(self._inner.save)

    def finalize(self, status: str) -> None:
        """Lightning's word, for later."""
        self._status = status

    def close(self) -> None:
        """The run is over."""
        self._do(lambda: self._inner.finalize(self._status))

    def _do(self, call: Callable[[], Any]) -> None:
        if self.failed:
            return
        try:
            call()
        except Exception as error:
            self.failed = describe(error)
            self._say(f"warning: logger '{self._label}' failed ({self.failed}); the run goes on without it")


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
