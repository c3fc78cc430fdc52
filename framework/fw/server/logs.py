"""A line of JSON on stderr for each request, and for whatever else is to be known."""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, TextIO


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
    """

    def __init__(self, out: TextIO | None = sys.stderr) -> None:
        self._out = out

    def line(self, event: str, **content: Any) -> None:
        """One."""
        if self._out is not None:
            now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
            self._out.write(json.dumps({"time": now, "event": event, **content}, default=str) + "\n")
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
        trace = logging.Formatter().formatException(record.exc_info) if record.exc_info and record.exc_info[0] is not None else None
        self._log.line(
            "log", level=record.levelname.lower(), logger=record.name, message=record.getMessage(), **({"trace": trace} if trace else {})
        )
