"""A connection, whose client must say what it wants within bounds of time and size."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_HEAD_BYTES = 64 << 10


class Connection(HttpToolsProtocol):
    """uvicorn's, which waits for ever for the rest of a head, and keeps as much of it as comes."""

    head_seconds = 30.0
    """From the connection, or the first byte that follows an answer, to the end of a request's head."""
    _waiting: asyncio.TimerHandle | None = None
    _unread = 0
    """Bytes since the last that were a head's end, or of a body."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As asyncio has it."""
        super().connection_made(transport)
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
