"""SIGTERM and Ctrl-C at moments of a server's life at which there is nobody to drain for, and more than once."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from serving import PATIENCE_S, serving, until

WINDOWS = {
    "its options are read": ("fw.server.settings", "settings", 0),
    "one engine of two is there": ("fw.server.starting", "start_process", 1),
    "signals are the event loop's, which has begun nothing": ("uvicorn.Config", "load", 2),
    "the application begins": ("fw.server.engines.Engines", "start", 2),
    "it could take requests": ("uvicorn.Server", "main_loop", 2),
}
"""What is called then, and how many engines there are."""
PROGRAM = """
import os, pkgutil, subprocess, sys
from fw.cli import main

where, name, number, *words = sys.argv[1:]
holder = pkgutil.resolve_name(where)
call, begin = getattr(holder, name), subprocess.Popen.__init__


def begun(self, *given, **more):
    begin(self, *given, **more)
    print("engine", self.pid, flush=True)


def asked(*given, **more):
    if name != "start_process":
        os.kill(os.getpid(), int(number))
        return call(*given, **more)
    made = call(*given, **more)
    os.kill(os.getpid(), int(number))
    return made


subprocess.Popen.__init__ = begun
setattr(holder, name, asked)
sys.exit(main(words))
"""
"""`fw` that is sent a signal by itself when something is called."""


def _gone(pid):
    try:
        return "zombie" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("window", WINDOWS)
def test_while_it_begins(directory, window, number):
    where, name, count = WINDOWS[window]
    words = [where, name, str(int(number)), "serve", str(directory), "--port", "0", "--replicas", "2"]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0 and "Traceback" not in done.stderr and "error" not in done.stderr, done.stderr
    engines = re.findall(r"^engine (\d+)$", done.stdout, re.MULTILINE)
    assert len(engines) == count
    for pid in engines:
        until(lambda pid=pid: _gone(pid))


def test_while_the_model_is_loaded(directory, tmp_path):
    """The engine, which alone imports torch, reads from a pipe that nobody writes into."""
    held = tmp_path / "held"
    os.mkfifo(held)
    (tmp_path / "torch.py").write_text(f"open({str(held)!r}).read()\n")
    environment = {"PYTHONPATH": str(tmp_path), "PYTHONHASHSEED": "1"}  # another seed: a process that begins as users' do
    with serving(directory, ready=False, environment=environment) as server:
        until(lambda: server.client().get("/ready").json()["status"] == "loading")

        def opened():
            try:
                return os.open(held, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # nobody reads yet
                return None

        writing = until(opened)
        engines = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        server.terminate()
        assert server.ended() == 0 and not any("failed" in line for line in server.errors)
        os.close(writing)
    assert len(engines) == 1 and _gone(engines[0])


@pytest.mark.parametrize("stream", [False, True])
def test_a_second_signal_ends_at_once(directory, stream):
    """Whoever still waits is told; the engine would never end the request."""
    with serving(directory, "--drain", "6000") as server:
        engine = server.engine()
        asked = {"prompt": "x", "max_tokens": 1900, "n": 8, "ignore_eos": True, "stream": stream}
        body = json.dumps(asked).encode()
        sock = server.raw()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)
        until(lambda: server.stats()["running"])
        os.kill(engine, signal.SIGSTOP)
        try:
            server.terminate()
            until(lambda: [line for line in server.log if line["event"] == "draining"])
            server.terminate()
            answer = sock.makefile("rb").read().decode()
            assert answer.startswith("HTTP/1.1 200" if stream else "HTTP/1.1 503") and '"code":"draining"' in answer
            assert server.ended() == 0
        finally:
            with suppress(ProcessLookupError):  # it has ended, if all is well
                os.kill(engine, signal.SIGCONT)
        assert _gone(engine)
