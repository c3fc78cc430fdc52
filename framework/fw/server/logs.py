"""A line of JSON on stderr for each request, and for whatever else is to be known."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, TextIO

from fw.errors import describe
from fw.server.writer import Writer


@dataclass
class Record:
    """Of one request, as far as is known.

    Attributes:
        more: what its handler has to say.
    """

    id: str
    method: str
    path: str
    begun: float = field(default_factory=time.monotonic)
    status: int | None = None
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Since it came."""
        return time.monotonic() - self.begun


current: ContextVar[Record | None] = ContextVar("request", default=None)
"""The request that is being answered."""


def note(**more: Any) -> None:
    """For the line of the current request."""
    if (record := current.get()) is not None:
        record.more.update(more)


class Log:
    """Where lines go.

    Args:
        out: None for nowhere.
        words: whether what requests say, and what is said of that, may be in it.
    """

    def __init__(self, out: TextIO | Writer | None = sys.stderr, words: bool = False) -> None:
        self._out, self.words = out, words

    def line(self, event: str, **content: Any) -> None:
        """One; it is lost where it cannot be written: a full disk or a reader that has gone ends no request, and no server."""
        if self._out is not None:
            with suppress(OSError, ValueError):  # the latter of a file that is closed
                self._out.write(_line(event, **content))
                self._out.flush()

    def request(self, record: Record) -> None:
        """One that has ended."""
        self.line(
            "request",
            id=record.id,
            method=record.method,
            path=record.path,
            status=record.status,
            seconds=round(record.seconds, 4),
            **record.more,
        )

    def failure(self, event: str, error: BaseException, **content: Any) -> None:
        """What nobody has expected: where, and, as it may repeat a request, what, only if words may be there."""
        message = describe(error) if self.words else type(error).__name__
        self.line(event, **content, message=message, trace=self.trace(error))

    def trace(self, error: BaseException) -> str:
        """Where it was raised, and what it came from."""
        return trace(error, self.words)


def _line(event: str, **content: Any) -> str:
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    return json.dumps({"time": now, "event": event, **content}, default=str) + "\n"


def lines_lost(count: int) -> str:
    """What stands where lines would, of which too many waited to be written."""
    return _line("log", level="warning", message=f"{count} lines are lost: nobody has read what was written before them")


def trace(error: BaseException, words: bool) -> str:
    """A traceback, with what exceptions say or without."""
    return "".join(traceback.format_exception(error)) if words else "\n".join(_places(error))


def _places(error: BaseException) -> Iterator[str]:
    """As Python writes them, without what exceptions say."""
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None:
        yield from _places(before)
    yield "".join(["Traceback (most recent call last):\n", *traceback.format_tb(error.__traceback__), type(error).__qualname__])
    for part in getattr(error, "exceptions", ()):
        yield from _places(part)


class ToLog(logging.Handler):
    """What libraries say, as lines, as long as this is entered: the log's file may be closed afterwards."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def __enter__(self) -> ToLog:
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """One."""
        error = record.exc_info[1] if record.exc_info else None
        message = record.getMessage()
        if error is None:
            self._log.line("log", level=record.levelname.lower(), logger=record.name, message=message)
            return
        if not self._log.words:
            message = message.partition("\n")[0]  # what asyncio tells of a task in the lines below is its exception, too
        self._log.line("log", level=record.levelname.lower(), logger=record.name, message=message, trace=self._log.trace(error))
