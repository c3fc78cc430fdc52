"""Around every request: who asks, of whom, how much is sent and for how long, and a line in the log."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import re
import uuid
from collections.abc import Iterable, MutableMapping
from contextlib import suppress
from typing import Any

from anyio import fail_after
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fw.config import ServeSection, parse_size
from fw.server.bodies import Refused
from fw.server.errors import ApiError, shown
from fw.server.logs import Log, Record, current
from fw.server.traces import Trace, no_traces
from fw.server.watching import late

_OPEN = frozenset({"/", "/health", "/ready", "/version"})
"""What anybody may see."""
_POLLED = frozenset({"/health", "/ready", "/metrics", "/stats"})
"""What is asked for again and again; only what goes wrong is worth a line."""
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_BODY_S = 60.0
"""Between two pieces of a body."""
_LINGER_S = 2.0
_FILES = "/v1/files"
_TIMES = 64


class Guard:
    """Middleware.

    Args:
        serve: says how large a body may be, how long a request may take, and by which names the server may be asked.
        keys: one of which a request must have; empty where none is asked for.
        trace: is told of a request that comes, with its headers, and gives what is to be told of its end.
    """

    def __init__(self, app: ASGIApp, serve: ServeSection, keys: Iterable[str], log: Log, trace: Trace = no_traces) -> None:
        self._app, self._keys, self._log, self._trace = app, [key.encode() for key in keys], log, trace
        self._max_body, self._seconds = parse_size(serve.max_body), serve.timeout
        # A page of another origin may give its own name this machine's address; then it asks from within, but by that name.
        unknown = (self._keys or serve.is_public) and not serve.allowed_hosts
        self._hosts = None if unknown or "*" in serve.allowed_hosts else {host.lower() for host in (serve.host, *serve.allowed_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        record = Record(given if _ID.fullmatch(given) else uuid.uuid4().hex, scope["method"], scope["path"])
        token = current.set(record)
        polled = record.path in _POLLED
        end = (no_traces if polled else self._trace)(record, headers)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", record.id.encode("latin-1"))]}
            await send(message)

        try:
            await self._guarded(scope, headers, receive, answer, record)
        finally:
            current.reset(token)
            end()
            if not polled or (record.status or 500) >= 400:
                self._log.request(record)

    async def _guarded(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send, record: Record) -> None:
        host = _name(headers.get(b"host", b"").decode("latin-1"))
        if self._hosts is not None and not (_is_safe(host) or host in self._hosts):
            message = f"this server is not to be asked by the name '{shown(host)}'; serve.allowed_hosts says by which it is"
            await _refuse(receive, send, ApiError(403, message, "host_not_allowed"))
            return
        most = self._max_body * (_TIMES if scope["path"].startswith(_FILES) else 1)
        if scope["path"] not in _OPEN and scope["method"] != "OPTIONS" and not self._knows(headers):
            message = "Incorrect API key provided; give one as 'Authorization: Bearer KEY'"
            await _refuse(receive, send, ApiError(401, message, "invalid_api_key"))
            return
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > most:
            await _refuse(receive, send, _too_large(most))
            return
        await self._app(scope, _bounded(receive, most, self._seconds, record), send)

    def _knows(self, headers: dict[bytes, bytes]) -> bool:
        if not self._keys:
            return True
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        found = False
        for key in self._keys:  # each, so that the time does not tell which
            found |= hmac.compare_digest(given.strip(), key)
        return found and scheme.lower() == b"bearer"


def _name(host: str) -> str:
    """Of a Host, without the port."""
    return re.sub(r":\d*$", "", host).rstrip(".").lower()


def _is_safe(name: str) -> bool:
    """It is no name that somebody could give this machine's address to."""
    if not name or name == "localhost" or name.endswith(".localhost"):  # browsers always give one, and this one they look up themselves
        return True
    try:
        ipaddress.ip_address(name[1:-1] if name.startswith("[") and name.endswith("]") else name)
    except ValueError:
        return False
    return True


def _bounded(receive: Receive, most: int, seconds: float, record: Record) -> Receive:
    """Of a body no more than so many bytes, none of which is waited for too long, nor all of them longer than the request may take."""
    left, more = most, True

    async def bounded() -> MutableMapping[str, Any]:
        nonlocal left, more
        if not more:
            return await receive()
        over = seconds - record.seconds
        try:
            with fail_after(min(_BODY_S, over)):  # without a task of its own, as wait_for has it: nearly all bodies are there already
                message = await receive()
        except TimeoutError:
            raise Refused(late(seconds) if over < _BODY_S else ApiError(408, "the request's body does not come", "timeout")) from None
        if message["type"] == "http.request":
            left -= len(message.get("body", b""))
            more = message.get("more_body", False)
            if left < 0:
                raise Refused(_too_large(most))
        return message

    return bounded


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the request's body is larger than the {most} bytes it may have", "request_too_large")


async def _refuse(receive: Receive, send: Send, error: ApiError) -> None:
    """Before the request has been read. What still comes of it is read then, for a while: were the connection closed at once, whoever is
    still sending would be told of that, and not of the answer (RFC 9112, section 9.6)."""
    body = json.dumps(error.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(_read(receive), _LINGER_S)
    await send({"type": "http.response.body", "body": b""})


async def _read(receive: Receive) -> None:
    message = await receive()
    while message["type"] == "http.request" and message.get("more_body", False):
        message = await receive()
