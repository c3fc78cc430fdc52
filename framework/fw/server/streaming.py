"""Answers as they come: server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fw.server import large
from fw.server.errors import ApiError
from fw.server.watching import Gone, while_there

DONE = b"data: [DONE]\n\n"
_PATIENCE_S = 1.0
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event(content: Mapping[str, Any], name: str | None = None, is_large: bool = False) -> bytes:
    """One, of JSON; with a name, as some interfaces have it."""
    data = large.written(content) if is_large else _encode(content).encode("utf-8", "replace")
    return (b"" if name is None else f"event: {name}\n".encode()) + b"data: " + data + b"\n\n"


class Streamed(Response):
    """A response that sends events until they end, or the client is gone.

    The status is sent with the first event, so that whatever is wrong with the request can be said by it.

    Args:
        seconds: that it may take.
        end: is called in the end, whether an event was asked for or not.
        failed: what is sent of an error, with whatever follows it; None for an event of its body and the last of all.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        seconds: float,
        end: Callable[[], None],
        failed: Callable[[ApiError], bytes] | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._seconds, self._end = events, seconds, end
        self._failed = failed or (lambda error: event(error.body()) + DONE)
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        try:
            await while_there(receive, self._send(send), self._seconds, self._end)
        except Gone:
            if not self._begun:
                raise
        except ApiError as error:
            if not self._begun:
                raise
            with suppress(asyncio.TimeoutError):  # who does not read is not waited for
                message = {"type": "http.response.body", "body": self._failed(error), "more_body": False}
                await asyncio.wait_for(send(message), _PATIENCE_S)
        finally:
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        async for each in self._events:
            if not self._begun:
                self._begun = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": each, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
