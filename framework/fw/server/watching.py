"""Work for a client, as long as it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

from fw.server.errors import ApiError
from fw.server.logs import current

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_T = TypeVar("_T")


class Gone(Exception):
    """The client has closed its connection."""


async def while_there(receive: Receive, work: Coroutine[Any, Any, _T], seconds: float, end: Callable[[], None] = lambda: None) -> _T:
    """What comes of the work, which is cancelled when the client is gone or time is over.

    Args:
        receive: the request's, whose body has been read.
        seconds: that the request may take from its arrival.
        end: is called in the end, also where the work could not even begin.

    Raises:
        Gone: nobody is there to be told.
        ApiError: time is over.
    """
    record = current.get()
    left = seconds if record is None else max(0.0, seconds - record.seconds)
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise Gone
        raise late(seconds)
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
        end()


def late(seconds: float) -> ApiError:
    """A request has taken longer than this."""
    return ApiError(408, f"the request has taken more than the {seconds:g} s it may", "timeout")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
