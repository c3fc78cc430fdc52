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
from fw.server.messages import Add, DropAdapter, Hold, LoadAdapter, Loaded, Release, State
from fw.server.settings import Settings
from fw.server.starting import Starting
from fw.tokenizer import Tokenizer, load_tokenizer

Condition = Literal["loading", "ready", "draining", "failed"]
_RETRY_S = 1
_BIASES, _STOP_IDS = 1024, 128
"""Of a request, as vLLM has it."""
_STOPS, _STOP_CHARACTERS = 64, 256
"""Texts that end an answer, which is compared with each of them after each token."""


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
        self._held: set[str] = set()
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
        if adapter is not None and adapter not in self.adapters:  # it was there when its prompts came
            raise not_found(f"The model '{adapter}' does not exist any more", "model", "model_not_found")
        self.check(prompts, sampling, pooling)
        more = sampling.drawn * len(prompts)
        room = self.most + self._settings.serve.max_queue - sum(engine.ahead(priority) for engine in self._engines)
        if more > room:
            self.rejected += 1
            raise ApiError(429, "the queue is full; try again later", "queue_full", retry_after=_RETRY_S)
        return self.go_on(prompts, sampling, adapter, priority, pooling)

    def check(self, prompts: Sequence[Sequence[int]], sampling: Sampling, pooling: Pooling | None = None) -> None:
        """Whether they are ever to be computed.

        Raises:
            ApiError: one is not.
        """
        bound, context = self._settings.serve.max_prompt_tokens, self.facts.context
        for prompt in prompts:
            if bound is not None and len(prompt) > bound:
                raise wrong(f"the prompt has {len(prompt)} tokens, and this server takes {bound} at most", code="context_length_exceeded")
            if len(prompt) + (sampling.max_tokens != 0 and pooling is None) > context:
                raise wrong(
                    f"the prompt has {len(prompt)} tokens, and prompt and answer together at most {context}", code="context_length_exceeded"
                )
        _check_wishes(sampling, self.facts.max_sequences)

    def go_on(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        adapter: str | None = None,
        priority: int = 0,
        pooling: Pooling | None = None,
        held: str | None = None,
    ) -> list[Ticket]:
        """More of a request that was taken, in the place of what has ended of it: however many wait by now, and even while no others are
        taken.

        Args:
            held: of :meth:`hold`.

        Raises:
            ApiError: there is no engine any more.
        """
        if self.condition == "failed":
            self.check_open()
        tickets = []
        for prompt in prompts:
            engine = min(self._engines, key=lambda each: (each.ahead(priority), each.sequences))
            ticket = Ticket(engine, uuid.uuid4().hex, sampling.drawn, priority)
            engine.begin(ticket, Add(ticket.key, prompt, sampling, priority, adapter, pooling, held))
            tickets.append(ticket)
        return tickets

    def hold(self, adapter: str) -> str:
        """Keeps an adapter that is there now for what comes later of a request, until :meth:`release`."""
        key = uuid.uuid4().hex
        self._held.add(key)
        for engine in self._engines:
            engine.tell(Hold(key, adapter))
        return key

    def release(self, held: str) -> None:
        """Nothing more comes, if it has not been said before."""
        if held in self._held:
            self._held.remove(held)
            for engine in self._engines:
                engine.tell(Release(held))

    async def load_adapter(self, name: str, directory: str) -> None:
        """On all, or on none. Until all have it, no request may ask for it.

        Raises:
            ApiError: it does not fit, or the name is taken.
        """
        async with self._one_at_a_time:
            self.check_open()
            if name in (self._settings.name, *self.adapters):
                raise wrong(f"there is a model '{name}' already; give another name, or unload it first", "lora_name")
            if len(self.adapters) >= (most := self._settings.serve.max_adapters):
                raise wrong(f"there are {most} adapters, and there may be no more (serve.max_adapters); unload one first", "lora_name")
            loaded: list[EngineProcess] = []
            for engine in self._engines:
                done = await engine.change(LoadAdapter(uuid.uuid4().hex, name, directory))
                if done.error is not None:
                    for other in loaded:
                        await other.change(DropAdapter(uuid.uuid4().hex, name))
                    raise wrong(done.error)
                loaded.append(engine)
            self.adapters = [*self.adapters, name]

    async def drop_adapter(self, name: str) -> None:
        """On all; requests that have it go on, and from the beginning none may ask for it.

        Raises:
            ApiError: there is none of this name.
        """
        async with self._one_at_a_time:
            self.check_open()
            if name not in self.adapters:
                raise not_found(f"there is no adapter '{name}'", "lora_name", "adapter_not_found")
            self.adapters = [each for each in self.adapters if each != name]
            for engine in self._engines:
                done = await engine.change(DropAdapter(uuid.uuid4().hex, name))
                if done.error is not None:
                    raise wrong(done.error)

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


def _check_wishes(sampling: Sampling, max_sequences: int) -> None:
    """What every step looks at is not too much, and the answers to a prompt run at once.

    Raises:
        ApiError: they are more.
    """
    for name, given, most in (
        ("logit_bias", sampling.logit_bias, _BIASES),
        ("stop_token_ids", sampling.stop_token_ids, _STOP_IDS),
        ("stop", sampling.stop, _STOPS),
    ):
        if len(given) > most:
            raise wrong(f"{name}: {len(given)} are more than the {most} that one request may have", name)
    if (longest := max(map(len, sampling.stop), default=0)) > _STOP_CHARACTERS:
        raise wrong(f"stop: a text of {longest} characters is longer than the {_STOP_CHARACTERS} that one may have", "stop")
    if sampling.drawn > max_sequences:
        raise wrong(f"{sampling.drawn} answers are more than this server computes at once, {max_sequences}; ask for fewer")
