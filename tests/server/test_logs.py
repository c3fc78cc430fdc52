"""Lines of the log: one each, of JSON, and nothing that a request says unless it is asked for."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import io
import json
import logging
import os
import signal
import subprocess
import sys

import httpx
import pytest
from pydantic import BaseModel, ValidationError

from fw.server.logs import Log, Record, ToLog
from fw.server.writer import Writer
from serving import PATIENCE_S

SECRET = "a secret"


class _Body(BaseModel):
    prompt: int


def _fails(text):
    """As code does that nobody has expected to: what it was given is in what it says, and in what that came from."""
    try:
        _Body.model_validate({"prompt": text})
    except ValidationError as error:
        assert text in str(error), "pydantic repeats what it was given"
        try:
            raise KeyError(text) from error
        except KeyError:
            raise ValueError(text)  # noqa: B904 - as where it is forgotten


@pytest.mark.parametrize("words", [False, True])
def test_what_fails_says_where_and_words_only_if_asked_for(words):
    out = io.StringIO()
    log = Log(out, words)

    async def unheard():
        asyncio.ensure_future(_failing(SECRET))  # noqa: RUF006 - asyncio says of a task that nobody asks what it has raised
        for _ in range(3):
            await asyncio.sleep(0)

    with ToLog(log):
        try:
            _fails(SECRET)
        except ValueError as error:
            logging.getLogger("uvicorn.error").error("Exception in ASGI application\n", exc_info=error)
            log.failure("batch", error, id="x")
        asyncio.run(unheard())
        gc.collect()
    lines = of_uvicorn, of_batch, of_asyncio = [json.loads(line) for line in out.getvalue().splitlines()]
    for line in (of_uvicorn, of_batch):
        assert all(kind in line["trace"] for kind in ("ValidationError", "KeyError", "ValueError", "in _fails"))
    assert of_batch["id"] == "x" and of_batch["message"].startswith("ValueError")
    assert of_asyncio["logger"] == "asyncio" and "never retrieved" in of_asyncio["message"] and "in _failing" in of_asyncio["trace"]
    assert [SECRET in line["message"] + line["trace"] for line in lines] == [words] * 3


async def _failing(text):
    raise ValueError(text)


def test_whatever_is_in_a_line_it_is_one():
    out = io.StringIO()
    strange = 'a\r\nb\u2028c\x00\x1b[2J"\ud800'
    record = Record(strange, strange, strange, more={"model": strange})
    Log(out).request(record)
    assert out.getvalue().isascii() and out.getvalue().count("\n") == 1 and "\x1b" not in out.getvalue()
    assert json.loads(out.getvalue())["path"] == strange


class _Full(io.StringIO):
    """As a disk that is full, or a pipe that nobody reads, has it."""

    def __init__(self, where):
        super().__init__()
        self._where = where

    def write(self, text):
        if self._where == "write":
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)

    def flush(self):
        if self._where == "flush":
            raise OSError(28, "No space left on device")


@pytest.mark.parametrize("where", ["write", "flush", "closed"])
def test_a_log_that_cannot_be_written_ends_nothing(where):
    out = _Full(where)
    if where == "closed":
        out.close()
    log = Log(out)
    log.line("ready")
    log.request(Record("1", "GET", "/"))
    log.failure("batch", ValueError("x"))
    with ToLog(log):
        logging.getLogger("asyncio").error("x")


def test_lines_that_nobody_reads_hold_up_nobody():
    """A pipe that holds 4 KiB, and a writer that holds 100 characters more."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writing, b"x" * 4096)
    with open(writing, "w") as out, open(reading, "rb") as file:
        writer = Writer(out, lambda count: f"{count} lost\n", most=100)
        for number in range(20):
            writer.write(f"line {number:4}\n")
        Log(writer).line("ready")
        assert file.read(4096) == b"x" * 4096
        there = [f"line {number:4}\n" for number in range(10)]
        assert [file.readline().decode() for _ in range(11)] == [*there, "11 lost\n"]
        writer.write("later\n")
        writer.close(PATIENCE_S)
        out.close()
        assert file.read() == b"later\n"


def test_a_writer_that_cannot_write_ends_nothing():
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as out:
        writer = Writer(out)
        writer.write("x\n")
        writer.close(PATIENCE_S)
        writer.write("y\n")
    closed = io.StringIO()
    closed.close()
    for out in (closed, _Full("flush")):
        writer = Writer(out)
        writer.write("x\n")
        writer.close(PATIENCE_S)


def test_a_file_without_a_descriptor_is_written_as_it_is():
    """As a notebook's."""
    out = io.StringIO()
    writer = Writer(out)
    Log(writer).line("ready")
    writer.close(PATIENCE_S)
    assert json.loads(out.getvalue())["event"] == "ready"


@pytest.mark.parametrize("kind", ["full disk", "unread pipe"])
def test_a_server_outlives_what_its_log_goes_to(directory, kind):
    reading, errors = (None, os.open("/dev/full", os.O_WRONLY)) if kind == "full disk" else os.pipe()
    if reading is not None:
        fcntl.fcntl(errors, fcntl.F_SETPIPE_SZ, 4096)
        os.write(errors, b"x" * 4096)
    words = [sys.executable, "-m", "fw", "serve", str(directory), "--port", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True)
    os.close(errors)
    try:
        said = process.stdout.readline()
        url = said.split()[-1]
        assert "fw: ready" in process.stdout.readline()
        for path, status in (("/v1/models", 200), ("/nowhere", 404), ("/v1/models", 200)):
            assert httpx.get(url + path, timeout=PATIENCE_S).status_code == status
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        if reading is not None:
            os.close(reading)


def test_ids_of_requests(server):
    with server.client() as client:
        for text in (b"x" * 129, b"x" * 30_000, b"a b", b"a\tb", b"\xff", b"", b"caf\xc3\xa9"):
            found = client.get("/v1/models", headers={b"X-Request-Id": text})
            assert found.status_code == 200 and found.headers["x-request-id"].isalnum() and len(found.headers["x-request-id"]) == 32
        assert client.get("/v1/models", headers={"X-Request-Id": "x" * 128}).headers["x-request-id"] == "x" * 128
    for text in (b"x" * (1 << 20), b"a\rb", b"a\nb", b"a\x00b", b"a\x1b[2Jb"):
        with server.raw() as sock:
            sock.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Request-Id: " + text + b"\r\n\r\n")
            assert sock.makefile("rb").readline().split()[1] == b"400", text[:10]
