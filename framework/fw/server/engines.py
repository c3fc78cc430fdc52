"""All engines of a server: who gets a request, and who gets none."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Literal

from fw.errors import UserError
from fw.inference.options import Sampling
from fw.inference.results import Pooling
from fw.server.engine import EngineProcess, Ticket
from fw.server.errors import ApiError, not_found, wrong
from fw.server.messages import Add, DropAdapter, LoadAdapter, Loaded, State
from fw.server.settings import Settings
from fw.server.starting import Starting
from fw.tokenizer import Tokenizer, load_tokenizer

Condition = Literal["loading", "ready", "draining", "failed"]
_RETRY_S = 1


class Engines:
    """Gives requests to the one with the fewest.

    Args:
        starting: their processes.
        on_ready: called once, when all are.
        on_failure: called when one ends by itself, with why.
    """

    def __init__(
        self,
        settings: Settings,
        starting: Starting,
        on_ready: Callable[[], None] = lambda: None,
        on_failure: Callable[[UserError | str], None] = lambda why: None,
    ) -> None:
        self._settings, self._on_ready, self._on_failure = settings, on_ready, on_failure
        self.condition: Condition = "loading"
        self.rejected = 0
        self.tokenizer: Tokenizer | None = None
        self.adapters: list[str] = []
        self.starting = starting
        self._engines: list[EngineProcess] = []
        self._one_at_a_time = asyncio.Lock()

    def start(self) -> None:
        """Hear them; within the event loop that they are to be used in."""
        for number, child in enumerate(self.starting.children):
            self._engines.append(EngineProcess(child, number, self._loaded, self._failed))

    def _loaded(self, engine: EngineProcess) -> None:
        if any(each.loaded is None for each in self._engines) or self.condition != "loading":
            return
        assert engine.loaded is not None
        try:
            self.tokenizer = load_tokenizer(engine.loaded.tokenizer)
        except UserError as error:
            self._failed(error)
            return
        self.adapters = list(engine.loaded.adapters)
        self.condition = "ready"
        self._on_ready()

    def _failed(self, why: UserError | str) -> None:
        self.condition = "failed"
        self._on_failure(why)

    @property
    def facts(self) -> Loaded:
        """Of any of them.

        Raises:
            ApiError: none is ready.
        """
        loaded = self._engines[0].loaded if self._engines else None
        if loaded is None or self.tokenizer is None:
            raise ApiError(503, "the model is being loaded", "loading", retry_after=_RETRY_S)
        return loaded

    @property
    def pids(self) -> list[int]:
        """Of their processes."""
        return [engine.pid for engine in self._engines]

    @property
    def state(self) -> State:
        """All together."""
        states = [engine.state for engine in self._engines]
        return State(**{each.name: sum(getattr(state, each.name) for state in states) for each in fields(State)})

    @property
    def sequences(self) -> int:
        """Of requests that have not ended."""
        return sum(engine.sequences for engine in self._engines)

    @property
    def most(self) -> int:
        """Sequences that are computed at once."""
        return self.facts.max_sequences * len(self._engines)

    @property
    def kv_budget_bytes(self) -> int:
        """Of all."""
        return self.facts.kv_budget_bytes * len(self._engines)

    def check_open(self) -> None:
        """Requests are taken.

        Raises:
            ApiError: not yet, or not any more.
        """
        if self.condition == "draining":
            raise ApiError(503, "the server is being shut down", "draining", retry_after=_RETRY_S)
        if self.condition == "failed":
            raise ApiError(503, "the engine has ended", "engine_ended")
        assert self.facts

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        adapter: str | None = None,
        priority: int = 0,
        pooling: Pooling | None = None,
    ) -> list[Ticket]:
        """All of them, or none. Who has a ticket must leave it in the end.

        Args:
            priority: lower goes first, and finds the queue as long as it is for whoever goes first.

        Raises:
            ApiError: the queue is full, no requests are taken, or one is never to be computed.
        """
        self.check_open()
        bound, context = self._settings.serve.max_prompt_tokens, self.facts.context
        for prompt in prompts:
            if bound is not None and len(prompt) > bound:
                raise wrong(f"the prompt has {len(prompt)} tokens, and this server takes {bound} at most", code="context_length_exceeded")
            if len(prompt) + (sampling.max_tokens != 0 and pooling is None) > context:
                raise wrong(
                    f"the prompt has {len(prompt)} tokens, and prompt and answer together at most {context}", code="context_length_exceeded"
                )
        more = sampling.drawn * len(prompts)
        room = self.most + self._settings.serve.max_queue - sum(engine.ahead(priority) for engine in self._engines)
        if more > room:
            self.rejected += 1
            raise ApiError(429, "the queue is full; try again later", "queue_full", retry_after=_RETRY_S)
        tickets = []
        for prompt in prompts:
            engine = min(self._engines, key=lambda each: (each.ahead(priority), each.sequences))
            ticket = Ticket(engine, uuid.uuid4().hex, sampling.drawn, priority)
            engine.begin(ticket, Add(ticket.key, prompt, sampling, priority, adapter, pooling))
            tickets.append(ticket)
        return tickets

    async def load_adapter(self, name: str, directory: str) -> None:
        """On all.

        Raises:
            ApiError: it does not fit, or the name is taken.
        """
        await self._change(lambda: LoadAdapter(uuid.uuid4().hex, name, directory))

    async def drop_adapter(self, name: str) -> None:
        """On all; requests that have it go on.

        Raises:
            ApiError: there is none of this name.
        """
        if name not in self.adapters:
            raise not_found(f"there is no adapter '{name}'", "lora_name", "adapter_not_found")
        await self._change(lambda: DropAdapter(uuid.uuid4().hex, name))

    async def _change(self, message: Callable[[], LoadAdapter | DropAdapter]) -> None:
        self.check_open()
        async with self._one_at_a_time:
            for engine in self._engines:
                done = await engine.change(message())
                if done.error is not None:
                    raise wrong(done.error)
            self.adapters = list(done.adapters)

    def drain(self) -> None:
        """Take no more requests."""
        if self.condition in ("ready", "loading"):
            self.condition = "draining"

    def give_up(self) -> None:
        """Tell whoever still waits that nothing more comes."""
        for engine in self._engines:
            engine.give_up(ApiError(503, "the server is being shut down, and the answer is not whole", "draining"))

    async def close(self) -> None:
        """End all."""
        await asyncio.gather(*(engine.close() for engine in self._engines))
