"""A server's life: engines that begin, requests that are taken, and an end in which nobody is forgotten."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fw.config import format_size
from fw.errors import FwError, RunError, UserError
from fw.server.api import Api
from fw.server.app import create_app
from fw.server.batches import Batches
from fw.server.engines import Engines
from fw.server.errors import ApiError
from fw.server.logs import Log
from fw.server.settings import Settings
from fw.server.starting import Starting
from fw.server.traces import Traces, no_traces
from fw.server.writer import Writer

_POLL_S = 0.05
_STATE = frozenset({"/", "/health", "/ready", "/version", "/metrics", "/stats"})
"""What only looks at the server, whose end waits for nobody who does."""


class Service:
    """An ASGI application.

    Args:
        starting: the engines' processes, which are its from now on.
        stop: called when there is nothing more to do, to be told to end.
        say: is told what a user wants to know.
        errors: where the log goes.

    Raises:
        UserError: spans are to be sent, and cannot be.
    """

    def __init__(
        self, settings: Settings, starting: Starting, stop: Callable[[], None], say: Callable[[str], None], errors: Writer | None
    ) -> None:
        self.settings = settings
        self.log = Log(errors if settings.serve.log == "json" else None, settings.serve.log_prompts)
        self.engines = Engines(settings, starting, self._ready, self._failed)
        self.api = Api(settings, self.engines)
        self.failure: FwError | None = None
        self._stop, self._say = stop, say
        self._traces = Traces(settings.serve.traces) if settings.serve.traces else None
        trace = self._traces.begin if self._traces is not None else no_traces
        self._batches = Batches(self.api, self.log, trace)
        self._app: ASGIApp = create_app(self.api, self._batches, self.log, trace)
        self._open: set[object] = set()
        self._draining: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] != "lifespan":
            await self._answer(scope, receive, send)
            return
        await receive()
        self.engines.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._batches.close()
        await self.engines.close()
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A request, which is known to be open until it has ended."""
        begun = False

        async def say(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        one = object()
        if scope["path"] not in _STATE:
            self._open.add(one)
        try:
            await self._app(scope, receive, say)
        except asyncio.CancelledError:  # uvicorn's, which ends and would say so in words of its own
            if begun or scope["type"] != "http":
                raise
            error = ApiError(503, "the server is being shut down, and the request has not been answered", "draining")
            await JSONResponse(error.body(), error.status)(scope, receive, send)
        finally:
            self._open.discard(one)

    def _ready(self) -> None:
        facts, engines = self.engines.facts, self.engines
        seconds = time.monotonic() - engines.starting.begun
        for said in facts.said:
            self._say(f"fw: {said}")
        copies = f"{self.settings.serve.replicas} engines, each " if self.settings.serve.replicas > 1 else ""
        self._say(
            f"fw: ready after {seconds:.1f} s on {facts.device}: {copies}{format_size(facts.state.weight_bytes)} of weights, up to"
            f" {facts.max_sequences} sequences of {facts.context:,} tokens, keys and values up to {format_size(facts.kv_budget_bytes)}"
        )
        self.log.line("ready", seconds=round(seconds, 2), device=facts.device, engines=engines.pids)
        self._batches.start()
        # What is loaded stays: looking through all of it for garbage would hold up whoever comes then.
        gc.collect()
        gc.freeze()

    def _failed(self, why: UserError | str) -> None:
        loaded = self.engines.tokenizer is not None
        what = "an engine" if loaded else "the engine, before the model was loaded,"
        self.failure = why if isinstance(why, UserError) else RunError(f"{what} {why}")
        self.log.line("failed", message=str(self.failure))
        self._stop()

    def drain(self) -> None:
        """Take no more requests, and stop when those that there are have ended, or time is over. A second time: at once."""
        if self._draining is None:
            self.engines.drain()
            self.log.line("draining", sequences=self.engines.sequences, requests=len(self._open))
            self._draining = asyncio.ensure_future(self._drained(frozenset(self._open)))
        else:
            self.engines.give_up()
            self._stop()

    async def _drained(self, requests: frozenset[object]) -> None:
        """Those that come later are refused, and do not lengthen it."""
        end = time.monotonic() + self.settings.serve.drain
        while (self.engines.sequences or requests & self._open) and time.monotonic() < end:
            await asyncio.sleep(_POLL_S)
        if self.engines.sequences or requests & self._open:
            self.log.line("not waited for", sequences=self.engines.sequences, requests=len(requests & self._open))
            self.engines.give_up()
        self._stop()
