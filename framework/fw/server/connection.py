"""A connection, one of no more than there may be, whose client must say what it wants within bounds of time and size."""

from __future__ import annotations

import asyncio
import fcntl
import json
import resource
import sys
import termios
from collections.abc import Iterable
from contextlib import suppress
from http import HTTPStatus

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from fw.errors import UserError
from fw.server.errors import ApiError

_HEAD_BYTES = 64 << 10
_FILES = 1 << 16
"""Open ones at most, where the system has no bound of its own."""
_PIPELINED = 8
"""Requests that may wait for the one before them while more is read."""
_OWN_FILES = 256
"""That a server has open beside connections: engines, logs, adapters, files of batches."""


class Connection(HttpToolsProtocol):
    """uvicorn's, which waits for ever for the rest of a head, and for an answer to be read, and keeps as much of either as there is."""

    head_seconds = 30.0
    """From the connection, or the first byte that follows an answer, to the end of a request's head."""
    taking_seconds = 30.0
    """Between two looks at whether a client takes what waits for it; the connection of one that has taken nothing in between is ended."""
    most = _FILES
    """Connections at a time; a client that comes then is told so at once."""
    _waiting: asyncio.TimerHandle | None = None
    _looking: asyncio.TimerHandle | None = None
    _unread = 0
    """Bytes since the last that were a head's end, or of a body."""
    _untaken: int | None = None
    """Bytes that a client had not taken when it was last looked at; None where nothing had to wait for it since."""
    _running: RequestResponseCycle | None = None
    """The request that is being answered, which is not the last one where a client sends the next before it has the answer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As asyncio has it."""
        super().connection_made(transport)
        self._look_later()
        if len(self.connections) > self.most:
            self._refuse(_full(self.most))
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
        self._look_no_more()
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        """Likewise."""
        self._untaken = None
        super().resume_writing()

    def on_headers_complete(self) -> None:
        """As httptools has it."""
        self._unread = 0
        self._wait_no_more()
        super().on_headers_complete()
        if 0 < len(self.pipeline) <= _PIPELINED:
            self.flow.resume_reading()  # who does not read does not notice that the client goes away

    def on_body(self, body: bytes) -> None:
        """Likewise."""
        self._unread = 0
        super().on_body(body)

    def handle_websocket_upgrade(self) -> None:
        """As uvicorn has it: from then on the connection is another protocol's."""
        self._look_no_more()
        super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        """Likewise, of what is no request; in the shape that errors have."""
        self._refuse(ApiError(400, msg))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _refuse(self, error: ApiError) -> None:
        self.transport.write(_answer(error, self.server_state.default_headers))
        self.transport.close()

    def _look_later(self) -> None:
        self._looking = self.loop.call_later(self.taking_seconds, self._look)

    def _look_no_more(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def _look(self) -> None:
        """Nothing is written while its client is waited for, so what it has not taken can only become less."""
        before, self._untaken = self._untaken, None
        if self.flow.write_paused or self.transport.is_closing():
            self._untaken = _unsent(self.transport)
            if before is not None and self._untaken >= before:
                self.transport.abort()
                return
        self._look_later()

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


def _full(most: int) -> ApiError:
    return ApiError(503, f"This server has {most} connections, which is all it takes; try again later.", "overloaded", retry_after=1)


def _answer(error: ApiError, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """With headers that all answers have, where there is no application yet to give it."""
    body, status = json.dumps(error.body()).encode(), HTTPStatus(error.status)
    head = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{name.decode()}: {value.decode()}" for name, value in headers)]
    head += ["content-type: application/json", f"content-length: {len(body)}", "connection: close"]
    head += [f"{name}: {value}" for name, value in error.headers.items()]
    return "\r\n".join([*head, "", ""]).encode() + body


def _unsent(transport: asyncio.Transport) -> int:
    """Bytes that are written and have not reached the client.

    Those that the system has count, too: it takes more only when many of them are gone, for which a slow reader needs long.
    """
    unsent = transport.get_write_buffer_size()
    with suppress(OSError):  # it does not tell
        queued = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        unsent += int.from_bytes(queued, sys.byteorder)
    return unsent
