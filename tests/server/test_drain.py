"""Who is waited for when a server is asked to end, beside what its engines have."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from fw.server.service import Service
from fw.server.settings import settings


class _Client:
    """One request of a server without engines, whose client does nothing until it is let go.

    Attributes:
        told: what became of it.
    """

    def __init__(self, service, method, path, *headers):
        self._go, self.told = asyncio.Event(), []
        scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": ""}
        self.task = asyncio.ensure_future(service({**scope, "headers": [(b"host", b"localhost"), *headers]}, self._receive, self._send))

    async def _receive(self):
        await self._go.wait()
        return {"type": "http.request", "body": b"", "more_body": False}

    async def _send(self, message):
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            await self._go.wait()
        self.told.append(message)

    def go(self):
        self._go.set()


UPLOAD = ("POST", "/v1/files", (b"content-type", b"multipart/form-data; boundary=x"))
LATE = ("GET", "/v1/models/other")
POLLED = ("GET", "/health")


async def _turns():
    for _ in range(50):
        await asyncio.sleep(0)


def _service(directory, stop):
    wanted = settings(str(directory), ["serve.drain=60"])
    return Service(wanted, SimpleNamespace(begin=None, begun=0.0, children=[]), stop, lambda text: None, None)


@pytest.mark.parametrize(
    ("before", "after", "order"),
    [(UPLOAD, None, ["ended", "stopped"]), (POLLED, None, ["stopped", "ended"]), (None, LATE, ["stopped", "ended"])],
)
def test_requests_that_have_begun_are_waited_for(directory, before, after, order):
    """Also such as engines know nothing of: a file that comes. Neither those that come later, nor whoever only looks at the server."""

    async def main():
        stopped, happened = asyncio.Event(), []

        def stop():
            happened.append("stopped")
            stopped.set()

        service = _service(directory, stop)
        clients = [_Client(service, *before)] if before else []
        await _turns()
        service.drain()
        clients += [_Client(service, *after)] if after else []
        await _turns()
        assert not clients[0].task.done()
        clients[0].task.add_done_callback(lambda _: happened.append("ended"))
        if order[0] == "stopped":
            await stopped.wait()
        clients[0].go()
        await clients[0].task
        await stopped.wait()
        await _turns()
        return happened

    assert asyncio.run(asyncio.wait_for(main(), 30)) == order


def test_whoever_is_not_waited_for_is_told(directory):
    """In the shape that errors have."""

    async def main():
        client = _Client(_service(directory, lambda: None), *UPLOAD)
        await _turns()
        client.task.cancel()
        client.go()
        await client.task
        return client.told

    head, body = asyncio.run(asyncio.wait_for(main(), 30))
    assert head["status"] == 503 and json.loads(body["body"])["error"]["code"] == "draining"
