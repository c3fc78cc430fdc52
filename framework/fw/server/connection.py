"""A connection, one of no more than there may be, whose client must say what it wants within bounds of time and size."""

from __future__ import annotations

import asyncio
import json
import resource

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fw.errors import UserError
from fw.server.errors import ApiError

_HEAD_BYTES = 64 << 10
_FILES = 1 << 16
"""Open ones at most, where the system has no bound of its own."""
_OWN_FILES = 256
"""That a server has open beside connections: engines, logs, adapters, files of batches."""


class Connection(HttpToolsProtocol):
    """uvicorn's, which waits for ever for the rest of a head, and keeps as much of it as comes."""

    head_seconds = 30.0
    """From the connection, or the first byte that follows an answer, to the end of a request's head."""
    most = _FILES
    """Connections at a time; a client that comes then is told so at once."""
    _waiting: asyncio.TimerHandle | None = None
    _unread = 0
    """Bytes since the last that were a head's end, or of a body."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As asyncio has it."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.write(_full(self.most))
            transport.close()
        else:
            self._wait()

    def data_received(self, data: bytes) -> None:
        """Likewise."""
        if self.cycle is not None and self.cycle.response_complete:
            self._wait()
        self._unread += len(data)
        super().data_received(data)
        if self._unread > _HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The request's head is larger than {_HEAD_BYTES} bytes.")

    def connection_lost(self, exc: Exception | None) -> None:
        """Likewise."""
        self._wait_no_more()
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        """As httptools has it."""
        self._unread = 0
        self._wait_no_more()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Likewise."""
        self._unread = 0
        super().on_body(body)

    def _wait(self) -> None:
        if self._waiting is None:
            self._waiting = self.loop.call_later(self.head_seconds, self.transport.close)

    def _wait_no_more(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


def at_most(asked: int | None) -> int:
    """As many connections as are asked for, or as the system lets this process have; it may then open as many files as that takes.

    Raises:
        UserError: the system lets it have fewer; how many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    bound = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    possible = max(1, bound - _OWN_FILES)
    if asked is not None and asked > possible:
        raise UserError(
            f"serve.max_connections: {asked} are more than this system's {bound} open files of a process allow (ulimit -Hn); give"
            f" {possible} at most"
        )
    most = possible if asked is None else asked
    if soft != resource.RLIM_INFINITY and soft < (files := min(bound, most + _OWN_FILES)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return most


def _full(most: int) -> bytes:
    error = ApiError(503, f"This server has {most} connections, which is all it takes; try again later.", "overloaded", retry_after=1)
    body = json.dumps(error.body()).encode()
    head = ["HTTP/1.1 503 Service Unavailable", "content-type: application/json", f"content-length: {len(body)}", "connection: close"]
    head += [f"{name}: {value}" for name, value in error.headers.items()]
    return "\r\n".join([*head, "", ""]).encode() + body
