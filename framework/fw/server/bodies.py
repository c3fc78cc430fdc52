"""Bodies of requests: JSON within bounds, refused before anything of it is understood."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine, Sequence
from math import isfinite
from typing import Any

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from fw.server.errors import ApiError, wrong

MOST_DEPTH = 100
"""Lists and objects within each other."""
MOST_CONTAINERS = 100_000
"""Lists and objects in all."""
MOST_MEMBERS = 10_000
"""Of one object."""
MOST_VALUES = 500_000
"""In all: reading and looking at so many takes a tenth of a second, in which nobody else's answer goes on."""
_STRING = re.compile(rb'"[^"]*"?')
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


class Refused(HTTPException):
    """An :class:`ApiError` while a body is read, where Starlette and FastAPI let no other exceptions pass."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.status, str(error))
        self.error = error


def parse(body: bytes) -> Any:
    """What a body says.

    Raises:
        JSONDecodeError: it is no JSON.
        ApiError: it is none that this server reads: not UTF-8, too deep, too much, with numbers or characters that there are not.
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _refused(f"it is no UTF-8 at byte {error.start}") from None
    check_shape(body)
    try:
        value = json.loads(text, parse_constant=_no_number, parse_float=_finite, object_hook=_small)
    except json.JSONDecodeError:
        raise
    except ValueError:  # an integer of more digits than Python reads
        raise _refused("a number in it has too many digits") from None
    if _HALF.search(text):  # a whole pair is fine
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = str(error.object)[error.start]
            raise _refused(f"{half!r} in it is half of a surrogate pair, which is no character; replace or remove it") from None
    return value


def check_shape(body: bytes) -> None:
    """JSON can be read within bounds of nesting and time.

    Raises:
        ApiError: it is too deep, or has too many lists, objects or values.
    """
    # Nearly always there are so few of each, within strings and outside, that nothing can be too much.
    if _containers(body) <= MOST_DEPTH and _values(body) <= MOST_VALUES:
        return
    if body.count(b'"') - body.count(rb"\"") > 4 * MOST_VALUES:  # two of each string, of which an object's members have two
        raise _too_many_values()
    bare = _bare(body)
    if _containers(bare) > MOST_CONTAINERS:
        raise _refused(f"it has more than {MOST_CONTAINERS:,} lists and objects")
    if _values(bare) > MOST_VALUES:
        raise _too_many_values()
    depth = 0
    for bracket in bare.translate(None, _NO_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        if depth > MOST_DEPTH:
            raise _refused(f"it is more than {MOST_DEPTH} lists and objects deep")


def check_shapes(bodies: Sequence[bytes]) -> None:
    """Likewise of several that one request brings: they have no more in all than one may.

    Raises:
        ApiError: one of them cannot be read so, or they have too much together.
    """
    for body in bodies:
        check_shape(body)
    containers, values = (sum(map(count, bodies)) for count in (_containers, _values))
    if containers > MOST_CONTAINERS or values > MOST_VALUES:  # in strings or outside
        bare = list(map(_bare, bodies))
        if sum(map(_containers, bare)) > MOST_CONTAINERS:
            raise _refused(f"it has more than {MOST_CONTAINERS:,} lists and objects")
        if sum(map(_values, bare)) > MOST_VALUES:
            raise _too_many_values()


def _containers(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{")


def _values(body: bytes) -> int:
    return body.count(b",") + 1


def _bare(body: bytes) -> bytes:
    """Without strings, in which brackets mean nothing; a string ends at the first quotation mark that is left when escapes are gone."""
    return _STRING.sub(b"", body.replace(rb"\\", b"").replace(rb"\"", b""))


def _too_many_values() -> ApiError:
    return _refused(f"it has more than {MOST_VALUES:,} values")


def _no_number(word: str) -> float:
    raise _refused(f"{word} in it is no JSON")


def _finite(digits: str) -> float:
    if not isfinite(number := float(digits)):
        raise _refused(f"the number {digits[:20]} in it is beyond all bounds")
    return number


def _small(members: dict[str, Any]) -> dict[str, Any]:
    if len(members) > MOST_MEMBERS:
        raise _refused(f"an object in it has more than {MOST_MEMBERS:,} members")
    return members


def _refused(why: str) -> ApiError:
    return wrong(f"the JSON cannot be read: {why}", code="invalid_json")


class JsonRequest(Request):
    """One whose body is read by :func:`parse`."""

    async def json(self) -> Any:
        """What the body says.

        Raises:
            JSONDecodeError: it is no JSON.
            Refused: it is none that this server reads.
        """
        try:
            return parse(await self.body())
        except ApiError as error:
            raise Refused(error) from None


class JsonRoute(APIRoute):
    """One whose requests are :class:`JsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As FastAPI has it."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return handle
