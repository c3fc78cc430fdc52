"""Clients that connect and do not come to the point."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from contextlib import suppress

import pytest
import uvicorn

from fw.config import ServeSection
from fw.server.connection import Connection
from fw.server.errors import ApiError
from fw.server.guard import Guard
from fw.server.logs import Log, Record, current
from fw.server.watching import while_there

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\n"
LARGE = 4 << 20
LOOPS = ["asyncio", "uvloop"]
"""The server has uvloop's where that is installed, whose connections are its own."""


async def _app(scope, receive, send):
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def _talking(talk, seconds, at_a_time=1000, app=_app, protocol=Connection, loop="asyncio"):
    """What a client makes of a server whose connections wait for so long, and are so many."""

    class Quick(protocol):
        head_seconds = seconds
        most = at_a_time

    async def main():
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        bounds = {"timeout_keep_alive": 60, "timeout_graceful_shutdown": 5}
        config = uvicorn.Config(app, log_config=None, http=Quick, lifespan="off", ws="none", **bounds)
        server = uvicorn.Server(config)
        running = asyncio.ensure_future(server.serve(sockets=[listening]))
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        try:
            return await asyncio.wait_for(talk(reader, writer), 30)
        finally:
            writer.close()
            server.should_exit = True
            await running

    made = pytest.importorskip(loop).new_event_loop()
    try:
        return made.run_until_complete(main())
    finally:
        made.close()


@pytest.mark.parametrize(("before", "begun"), [(b"", b""), (b"", b"GET / HT"), (b"", HEAD), (GET, b"GET / HT"), (GET, HEAD)])
def test_a_head_that_does_not_end_ends_the_connection(before, begun):
    async def talk(reader, writer):
        if before:
            writer.write(before)
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.write(begun)
        return await reader.read()

    assert _talking(talk, 0.05) == b""


def test_nor_do_many_bytes_one_by_one_keep_it():
    async def talk(reader, writer):
        ended = asyncio.ensure_future(reader.read())
        writer.write(HEAD)
        while not ended.done():
            writer.write(b"x")
            await asyncio.sleep(0.001)
        return await ended

    with suppress(ConnectionResetError):  # a byte was on its way
        assert _talking(talk, 0.05) == b""


@pytest.mark.parametrize("before", [b"", HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"])
def test_what_stands_in_heads_is_bounded(before):
    """Also in what may follow a body."""

    async def talk(reader, writer):
        writer.write(before or HEAD)
        try:
            for _ in range(300):
                writer.write(b"X-More: " + b"y" * 1000 + b"\r\n")
                await writer.drain()
                await asyncio.sleep(0)
            return await reader.read()
        except ConnectionError:
            return b""

    found = _talking(talk, 60)
    assert found == b"" or (found.startswith(b"HTTP/1.1 400") and b"larger than 65536 bytes" in found)


def test_whoever_comes_to_the_point_is_heard_as_long_as_they_like():
    """Large bodies, several requests, and a pause that is longer than a head may take."""

    async def talk(reader, writer):
        for n in range(3):
            body = b"z" * (n << 18)
            writer.write(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode())
            await writer.drain()
            if body:
                await asyncio.sleep(0.1)
            writer.write(body)
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        return True

    assert _talking(talk, 0.05)


def test_connections_are_no_more_than_there_may_be():
    """Whoever is there goes on, and whoever comes when another has gone is heard."""

    async def talk(reader, writer):
        port = writer.get_extra_info("peername")[1]
        writer.write(GET)
        await reader.readuntil(b"ok")
        second, other = await asyncio.open_connection("127.0.0.1", port)
        other.write(GET)
        await second.readuntil(b"ok")
        third, _ = await asyncio.open_connection("127.0.0.1", port)
        head, _, body = (await third.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503") and b"\r\nRetry-After: 1" in head and b"\r\nconnection: close" in head
        assert json.loads(body)["error"]["code"] == "overloaded"
        writer.write(GET)
        await reader.readuntil(b"ok")
        other.write(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        await second.readuntil(b"ok")
        assert await second.read() == b""
        fourth, again = await asyncio.open_connection("127.0.0.1", port)
        again.write(GET)
        return await fourth.readuntil(b"ok")

    assert _talking(talk, 60, at_a_time=2).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("apart", [False, True])
def test_whoever_goes_away_is_noticed_also_where_more_was_asked(apart, loop):
    """By the request that runs; the next does not even begin."""
    begun, gone = [], []

    async def waiting(scope, receive, send):
        begun.append(scope["path"])
        (going,) = gone
        while (await receive())["type"] != "http.disconnect":
            pass
        going.set()

    async def talk(reader, writer):
        gone.append(going := asyncio.Event())
        first, second = (f"GET /{name} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() for name in ("first", "second"))
        writer.write(first)
        while apart and not begun:
            await asyncio.sleep(0)
        writer.write(second)
        writer.close()
        await asyncio.wait_for(going.wait(), 20)
        return begun

    assert _talking(talk, 60, app=waiting, loop=loop) == ["/first"]


def test_many_requests_without_waiting_for_answers():
    async def talk(reader, writer):
        writer.write(GET * 100)
        for _ in range(100):
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        return True

    assert _talking(talk, 60)


async def _large(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(LARGE).encode())]})
    await send({"type": "http.response.body", "body": bytes(LARGE)})


async def _endless(scope, receive, send):
    async def sending():
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": bytes(1 << 14), "more_body": True})
            await asyncio.sleep(0)  # who is gone is sent nothing, and without a wait

    with suppress(Exception):
        await while_there(receive, sending(), 3600)


def _narrow(writer):
    """Another client of the same server, which takes little at once."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)
    sock.connect(writer.get_extra_info("peername"))
    sock.setblocking(False)
    return sock


def _watched(seconds):
    """Connections that look so often at what is taken."""
    looks, lost = asyncio.Queue(), asyncio.Queue()

    class Watched(Connection):
        taking_seconds = seconds

        def _look(self):
            super()._look()
            looks.put_nowait(self)

        def connection_lost(self, exc):
            super().connection_lost(exc)
            lost.put_nowait(self)

    return Watched, looks, lost


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("app", [_large, _endless])
@pytest.mark.parametrize("closing", [False, True])
def test_whoever_does_not_read_does_not_keep_an_answer(app, closing, loop):
    """Nor a connection that the server has closed, which ends only when all is read."""
    watched, _, lost = _watched(0.05)

    async def talk(reader, writer):
        with _narrow(writer) as sock:
            end = b"\r\nConnection: close\r\n\r\n" if closing else b"\r\n\r\n"
            await asyncio.get_running_loop().sock_sendall(sock, GET.replace(b"\r\n\r\n", end))
            connection = await asyncio.wait_for(lost.get(), 20)
            return connection.transport.get_write_buffer_size()

    assert _talking(talk, 60, app=app, protocol=watched, loop=loop) == 0


@pytest.mark.parametrize("loop", LOOPS)
def test_whoever_reads_slowly_gets_all(loop):
    """A little each time that the server looks."""
    watched, looks, _ = _watched(0.1)

    async def talk(reader, writer):
        with _narrow(writer) as sock:
            await asyncio.get_running_loop().sock_sendall(sock, GET)
            found = bytearray()
            while len(found.partition(b"\r\n\r\n")[2]) < LARGE:
                await looks.get()
                piece = await asyncio.get_running_loop().sock_recv(sock, 1 << 17)
                assert piece, "the connection has been ended"
                found += piece
            return len(found.partition(b"\r\n\r\n")[2])

    assert _talking(talk, 60, app=_large, protocol=watched, loop=loop) == LARGE


@pytest.mark.parametrize("sent", [b"GET /x?\xff HTTP/1.1\r\nHost: x\r\n\r\n", b"nonsense\r\n\r\n", HEAD + b"X: " + b"x" * (1 << 17)])
def test_what_is_no_request_is_told_in_the_shape_of_errors(sent):
    async def talk(reader, writer):
        writer.write(sent)
        return await reader.readuntil(b"}}")

    head, _, body = _talking(talk, 60).partition(b"\r\n\r\n")
    status, *headers = head.decode().lower().split("\r\n")
    assert status == "http/1.1 400 bad request" and "connection: close" in headers and any(line.startswith("date: ") for line in headers)
    assert "content-type: application/json" in headers and f"content-length: {len(body)}" in headers
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error" and error.keys() == {"message", "type", "param", "code"}


def test_files_are_as_many_as_connections_want():
    """In a process of its own, whose bounds these are."""
    code = """
import resource
from fw.errors import UserError
from fw.server.connection import at_most
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 1000))
print(at_most(100), *resource.getrlimit(resource.RLIMIT_NOFILE))
print(at_most(None), *resource.getrlimit(resource.RLIMIT_NOFILE))
try:
    at_most(800)
except UserError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert found[:2] == ["100 356 1000", "744 1000 1000"]
    assert found[2].startswith("serve.max_connections: 800 are more than this system's 1000 open files") and "give 744 at most" in found[2]


def test_a_body_counts_towards_the_time_of_a_request():
    """However often a piece of it comes."""

    async def receive():
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def reading(scope, receive, send):
        while (await receive()).get("more_body"):
            pass

    async def main():
        guard = Guard(reading, ServeSection(timeout=0.05), [], Log(None))
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        await guard(scope, receive, None)

    with pytest.raises(Exception, match=r"more than the 0\.05 s it may") as found:
        asyncio.run(asyncio.wait_for(main(), 30))
    assert found.value.status_code == 408 and found.value.error.code == "timeout"


def test_what_is_left_for_an_answer_is_less_by_what_its_request_took():
    async def main():
        async def for_ever():
            await asyncio.Event().wait()

        current.set(Record("1", "POST", "/", begun=time.monotonic() - 3600))
        await while_there(for_ever, for_ever(), 3600)

    with pytest.raises(ApiError, match="more than the 3600 s it may"):
        asyncio.run(asyncio.wait_for(main(), 30))
