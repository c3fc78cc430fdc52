"""A client of HTTP/1.1 that takes next to no time itself, for measurements on the machine that it shares with the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any


class Closed(Exception):
    """The server has closed the connection before the answer was whole."""


class Connection:
    """One, that is opened when it is needed and kept open as long as the server does.

    Args:
        url: http://host:port.

    Attributes:
        status: of the last answer.
    """

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._address = host, int(port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.status = 0

    async def send(self, data: bytes) -> asyncio.StreamReader:
        """As it is; where the answer comes from, which it may do before all is sent.

        Raises:
            ConnectionError: nobody is there.
        """
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address)
        reader, writer = self._streams
        with suppress(ConnectionError):
            writer.write(data)
            await writer.drain()
        return reader

    async def ask(self, method: str, path: str, body: Any = None) -> AsyncIterator[bytes]:
        """Send a request, JSON unless it is bytes; when this returns, the status is there, and the pieces of the answer are to be read.

        Raises:
            ConnectionError: nobody is there.
            Closed: there is no answer.
        """
        content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        reader = await self.send(head.encode() + content)
        try:
            lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            self.close()
            raise Closed from None
        self.status = int(lines[0].split()[1])
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        return self._pieces(reader, headers)

    async def _pieces(self, reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
        whole = False
        try:
            if headers.get("transfer-encoding") == "chunked":
                while length := int(await reader.readuntil(b"\r\n"), 16):
                    yield (await reader.readexactly(length + 2))[:-2]
                await reader.readexactly(2)
            else:
                yield await reader.readexactly(int(headers.get("content-length", 0)))
            whole = headers.get("connection") != "close"
        except (asyncio.IncompleteReadError, ConnectionError):
            raise Closed from None
        finally:
            if not whole:
                self.close()

    def close(self) -> None:
        """Go away."""
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None
