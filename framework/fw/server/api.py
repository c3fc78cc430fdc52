"""What all handlers share: who is asked, and what comes of a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

from starlette.requests import Request

from fw.errors import UserError
from fw.inference.asking import Prompt
from fw.inference.openai import Asked, asked
from fw.inference.options import Sampling
from fw.inference.results import Delta, Pooling, Result
from fw.server.engine import Ticket
from fw.server.engines import Engines
from fw.server.errors import ApiError, not_found, shown, wrong
from fw.server.logs import current, note
from fw.server.metrics import Metrics
from fw.server.planned import Plan
from fw.server.settings import Settings
from fw.server.streaming import Streamed
from fw.server.tokens import check_length, encode_all
from fw.server.tool_calls import family_of
from fw.server.watching import while_there
from fw.tokenizer import Tokenizer

_LONGEST_NAME = 200
"""Characters of a model's name that the log repeats: what a client calls one may be as long as a body."""


@dataclass(frozen=True)
class Part:
    """Of a request that is too wide to be begun at once.

    Attributes:
        width: sequences that it is computed as.
        begin: gives it to an engine.
    """

    width: int
    begin: Callable[[], list[Ticket]]


@dataclass(frozen=True)
class Begun:
    """A request that engines have.

    Attributes:
        whole: makes the answer's body of all results; ``events``, server-sent events as they come.
        later: parts that follow when those before them have ended.
        end: is called when nothing more of it is begun, perhaps more than once.
    """

    tickets: Sequence[Ticket]
    whole: Callable[[Sequence[Result]], dict[str, Any]]
    events: Callable[[], AsyncGenerator[bytes, None]]
    later: Sequence[Part] = field(default=(), kw_only=True)
    end: Callable[[], None] = field(default=lambda: None, kw_only=True)


def _add_up(**more: Any) -> None:
    """Of one of a request's prompts, for the line of the current request: to what there is of others."""
    if (record := current.get()) is not None:
        note(**{name: record.more[name] + value if name in record.more else value for name, value in more.items()})


def _note_first(seconds: float) -> None:
    """Of the prompt whose answer has begun first."""
    if (record := current.get()) is not None:
        record.more.setdefault("first_token_seconds", seconds)


def _note_prompt(text: str) -> None:
    """A list of them, where there are several."""
    if (record := current.get()) is not None:
        before = record.more.get("prompt")
        note(prompt=text if before is None else [*(before if isinstance(before, list) else [before]), text])


class Api:
    """A model that is served."""

    def __init__(self, settings: Settings, engines: Engines) -> None:
        self.settings, self.engines = settings, engines
        self.metrics = Metrics(engines, settings.name)
        self.plan = Plan(engines.starting.begin, lambda: engines.facts)
        self.created = int(time.time())
        self.hidden_size: int | None = None
        """Of the model; not known before there has been an embedding."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's.

        Raises:
            ApiError: it is not loaded yet.
        """
        assert self.engines.facts
        assert self.engines.tokenizer is not None
        return self.engines.tokenizer

    @property
    def defaults(self) -> Sampling:
        """How tokens are chosen where a request does not say."""
        return self.engines.facts.defaults

    @property
    def adapters(self) -> Sequence[str]:
        """That requests may ask for."""
        return self.engines.adapters

    @property
    def tool_format(self) -> str | None:
        """How the model writes calls of functions; None where it knows none."""
        wanted = self.settings.serve.tools
        if wanted == "auto":
            return family_of(self.tokenizer.chat_template, self.engines.facts.architecture)
        return None if wanted == "none" else wanted

    def adapter(self, name: str | None) -> str | None:
        """The adapter that a request asks for as its model; None for the model itself.

        Raises:
            ApiError: there is none of this name, or none can be known.
        """
        note(model=name and shown(name, _LONGEST_NAME))
        if name is None or name == self.settings.name:
            return None
        if name in self.adapters:
            return name
        self.engines.check_open()  # while it loads, nobody knows its adapters
        there = ", ".join([self.settings.name, *self.adapters])
        raise not_found(f"The model '{shown(name)}' does not exist; there are: {there}", "model", "model_not_found")

    def asked(self, url: str, body: Mapping[str, Any]) -> Asked:
        """Understand a body.

        Raises:
            ApiError: something about it is wrong.
        """
        for name in ("n", "best_of"):
            if (body.get(name) or 0) > self.settings.serve.max_n:
                raise wrong(f"{name}: {body[name]} is more than this server gives, {self.settings.serve.max_n}", name)
        try:
            return asked(self, url, body)
        except UserError as error:
            raise wrong(str(error)) from None

    @property
    def most_tokens(self) -> int:
        """Of a prompt."""
        context, bound = self.engines.facts.context, self.settings.serve.max_prompt_tokens
        return context if bound is None else min(bound, context)

    async def encode(self, prompts: Sequence[Prompt], param: str = "prompt") -> list[list[int]]:
        """Ids of prompts that are no conversations.

        Raises:
            ApiError: one is empty, or no text.
        """
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        check_length(self.tokenizer, texts, self.most_tokens, param)
        try:
            of_texts = iter(await encode_all(self.tokenizer, texts))
        except UserError as error:
            raise wrong(str(error), param) from None
        vocab_size = self.engines.facts.vocab_size
        found: list[list[int]] = []
        for prompt in prompts:
            ids = next(of_texts) if isinstance(prompt, str) else cast(list[int], list(prompt))
            if not ids:
                raise wrong("the prompt has no tokens; a model needs one at least", param)
            if not 0 <= min(ids) <= max(ids) < vocab_size:
                strange = next(token for token in ids if not 0 <= token < vocab_size)
                raise wrong(f"the prompt has token {strange}, and the model has {vocab_size}", param)
            found.append(ids)
        return found

    def prompts(self, given: Any, name: str = "prompt") -> list[Prompt]:
        """Of a field that has one prompt or several.

        Raises:
            ApiError: there are none, or too many.
        """
        many = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)
        if not many or (len(many) == 1 and not len(many[0])):
            raise wrong(f"{name}: there is nothing in it", name)
        if len(many) > (most := self.settings.serve.max_inputs):
            raise wrong(f"{name}: {len(many)} of them are more than this server takes at once, {most}", name)
        return many

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        adapter: str | None = None,
        priority: int = 0,
        pooling: Pooling | None = None,
    ) -> list[Ticket]:
        """As :meth:`Engines.submit`, in the log.

        Raises:
            ApiError: likewise; or they are more than there is ever room for.
        """
        wanted, room = sampling.drawn * len(prompts), self.engines.most + self.settings.serve.max_queue
        if wanted > room:
            raise wrong(
                f"the request is {wanted} sequences, and this server has room for {room} at most; ask for fewer at once",
                code="too_many_sequences",
            )
        note(prompt_tokens=sum(map(len, prompts)))
        return self.engines.submit(prompts, sampling, adapter, priority, pooling)

    async def follow(self, ticket: Ticket) -> AsyncGenerator[Delta | Result, None]:
        """What each step adds to the answer, and last the result. Who stops listening ends it.

        Raises:
            ApiError: there is no result.
        """
        begun = ticket.begun
        before: dict[int, float] = {}
        try:
            while True:
                each = await ticket.next()
                if isinstance(each, Delta):
                    if each.token is not None:
                        now = time.monotonic()
                        if each.index in before:
                            self.metrics.between(now - before[each.index])
                        elif not before:
                            self.metrics.first(now - begun)
                            _note_first(round(now - begun, 4))
                        before[each.index] = now
                    yield each
                    continue
                if each.embedding:
                    self.hidden_size = len(each.embedding)
                reasons = [completion.finish_reason for completion in each.completions]
                tokens = each.generated_tokens
                self.metrics.ended(time.monotonic() - begun, len(each.prompt_token_ids), tokens, list(reasons))
                _add_up(completion_tokens=tokens, cached_tokens=each.cached_tokens, finish_reasons=[] if each.embedding else reasons)
                if self.settings.serve.log_prompts:
                    _add_up(answers=[completion.text for completion in each.completions])
                    _note_prompt(self.tokenizer.decode(each.prompt_token_ids))
                yield each
                return
        finally:
            self.leave([ticket])

    def leave(self, tickets: Sequence[Ticket]) -> None:
        """Nobody waits for them any more; those that have ended are left already."""
        for ticket in tickets:
            if ticket.leave():
                self.metrics.aborted()
                note(aborted=True)

    async def result(self, ticket: Ticket) -> Result:
        """The result alone.

        Raises:
            ApiError: there is none.
        """
        async with aclosing(self.follow(ticket)) as told:
            async for each in told:
                if isinstance(each, Result):
                    return each
        raise AssertionError("an answer ends with its result")

    async def all_results(
        self, begun: Begun, room: Callable[[int], AbstractAsyncContextManager[None]] = lambda width: nullcontext()
    ) -> list[Result]:
        """Of all parts; where one fails, or nobody waits any more, none goes on.

        Args:
            room: is entered with the width of each later part while that is begun.

        Raises:
            ApiError: of one that failed.
        """
        try:
            found = await self.results(begun.tickets)
            for part in begun.later:
                async with room(part.width):
                    tickets = part.begin()
                try:
                    found += await self.results(tickets)
                finally:
                    self.leave(tickets)
            return found
        finally:
            begun.end()

    async def answers(self, request: Request, tickets: Sequence[Ticket]) -> list[Result]:
        """Results of all, as long as the client is there.

        Raises:
            ApiError: there are none.
            Gone: nobody is there to be told.
        """
        return await while_there(request.receive, self.results(tickets), self.settings.serve.timeout, lambda: self.leave(tickets))

    def streamed(
        self, events: AsyncGenerator[bytes, None], tickets: Sequence[Ticket], failed: Callable[[ApiError], bytes] | None = None
    ) -> Streamed:
        """Events that follow tickets, as long as the client is there; ``failed`` as of :class:`Streamed`."""
        return Streamed(events, self.settings.serve.timeout, lambda: self.leave(tickets), failed)

    async def results(self, tickets: Sequence[Ticket]) -> list[Result]:
        """Of all; where one fails, or nobody waits any more, none goes on.

        Raises:
            ApiError: of one that failed.
        """
        tasks = [asyncio.ensure_future(self.result(ticket)) for ticket in tickets]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def merged(self, tickets: Sequence[Ticket]) -> AsyncGenerator[tuple[int, Delta | Result], None]:
        """What becomes of several, as it comes, by their numbers."""
        if len(tickets) == 1:  # nearly always; without a task between
            async with aclosing(self.follow(tickets[0])) as alone:
                async for one in alone:
                    yield 0, one
            return
        told: asyncio.Queue[tuple[int, Delta | Result] | ApiError] = asyncio.Queue()

        async def pass_on(number: int, ticket: Ticket) -> None:
            try:
                async with aclosing(self.follow(ticket)) as each_of:
                    async for each in each_of:
                        told.put_nowait((number, each))
            except ApiError as error:
                told.put_nowait(error)

        tasks = [asyncio.ensure_future(pass_on(number, ticket)) for number, ticket in enumerate(tickets)]
        left = len(tickets)
        try:
            while left:
                each = await told.get()
                if isinstance(each, ApiError):
                    raise each
                left -= isinstance(each[1], Result)
                yield each
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
