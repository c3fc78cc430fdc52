"""By which names a server may be asked: a page may give its own the address of a visitor's machine (DNS rebinding)."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from fw.config import ServeSection
from fw.errors import UserError
from fw.server.guard import Guard
from fw.server.logs import Log
from serving import KEY


async def _app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


def _asked(asked_by, keys=(), **serve):
    guard = Guard(_app, ServeSection(**serve), keys, Log(None))

    async def main():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://localhost") as client:
            return await client.post("/v1/completions", headers={"Host": asked_by, "Authorization": f"Bearer {KEY}"})

    return asyncio.run(main())


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8000", "LOCALHOST.", "a.localhost:1", "127.0.0.1:8000", "127.8.8.8", "[::1]:8000", "[::1]", "10.0.0.1:80", ""],
)
def test_own_names_and_addresses_are_fine(host):
    assert _asked(host).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "notlocalhost", "[::1", "é"]
)
def test_other_names_are_refused_where_nothing_else_tells_who_asks(host):
    found = _asked(host.encode("latin-1"))
    assert found.status_code == 403 and found.json()["error"]["code"] == "host_not_allowed"
    assert "serve.allowed_hosts" in found.json()["error"]["message"]


def test_names_may_be_given():
    allowed = {"allowed_hosts": ["Models.example"]}
    assert _asked("models.example:443", **allowed).status_code == 200
    assert _asked("evil.example", **allowed).status_code == 403
    assert _asked("evil.example", allowed_hosts=["*"]).status_code == 200
    # Keys tell who asks, and a server of all addresses cannot know its names; both may be told.
    assert _asked("any.example", keys=[KEY]).status_code == 200
    assert _asked("any.example", host="0.0.0.0", insecure=True).status_code == 200
    assert _asked("any.example", keys=[KEY], **allowed).status_code == 403
    assert _asked("any.example", host="0.0.0.0", insecure=True, **allowed).status_code == 403


@pytest.mark.parametrize("name", ["http://models.example", "models.example:80", ""])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(UserError, match="allowed_hosts"):
        ServeSection(allowed_hosts=[name])
