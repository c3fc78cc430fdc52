"""``fw serve``: an address, signals, and an exit code."""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from fw.errors import EXIT_OK, UserError
from fw.server.settings import Settings
from fw.server.starting import Starting

_CLOSE_S = 5
_WRITE_S = 1
_NEEDED = ("fastapi", "uvicorn", "httptools", "prometheus_client", "python_multipart")


def run(settings: Settings) -> int:
    """Serve until SIGTERM or Ctrl-C; the exit code.

    Raises:
        UserError: the address is taken, there is no directory of adapters, or the model cannot be served.
        RunError: an engine has ended by itself.
    """
    for module in _NEEDED:
        if find_spec(module) is None:
            raise UserError(f"fw serve needs {module}: pip install 'fw[serve]'")
    if (allowed := settings.serve.adapters_dir) and not Path(allowed).expanduser().is_dir():
        raise UserError(f"serve.adapters_dir: there is no directory {allowed}; make it, or leave it out to load no adapters")
    listening = _listen(settings.serve.host, settings.serve.port)
    starting = Starting(settings)
    try:
        return _run(settings, listening, starting)
    except BaseException:
        starting.end()
        raise


def _run(settings: Settings, listening: socket.socket, starting: Starting) -> int:
    # A second, in which the engines import what is theirs.
    import uvicorn

    from fw.server.connection import Connection, at_most
    from fw.server.logs import ToLog, lines_lost
    from fw.server.service import Service
    from fw.server.writer import Writer

    class Server(uvicorn.Server):
        async def serve(self, sockets: list[socket.socket] | None = None) -> None:
            self.loop = asyncio.get_running_loop()  # before there is a signal that is heard by it
            await super().serve(sockets)

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            self.loop.call_soon_threadsafe(service.drain)

    class Bounded(Connection):
        most = at_most(settings.serve.max_connections)

    def stop() -> None:
        server.should_exit = True

    told, log = Writer(sys.stdout), Writer(sys.stderr, lines_lost)

    def say(text: str) -> None:
        told.write(text + "\n")

    service = Service(settings, starting, stop, say, log)
    config = uvicorn.Config(
        service,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=_CLOSE_S,
        http=Bounded,
    )
    server = Server(config)
    host, port = listening.getsockname()[:2]
    say(f"fw: serving {settings.name} at http://{f'[{host}]' if ':' in host else host}:{port}")

    with ExitStack() as stack:
        stack.callback(log.close, _WRITE_S)
        stack.callback(told.close, _WRITE_S)
        stack.enter_context(ToLog(service.log))
        server.run(sockets=[listening])
    if service.failure is not None:
        raise service.failure
    return EXIT_OK


def _listen(host: str, port: int) -> socket.socket:
    """At the address, before anything is loaded."""
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)  # who knows the address may come, and is heard as soon as there is a loop
    except OSError as error:
        raise UserError(f"serve.host, serve.port: cannot listen at {host}:{port}: {error.strerror or error}; give another") from None
    return listening
