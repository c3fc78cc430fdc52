"""``/v1/completions``: prompts that are gone on from."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from fw.inference.openai import TEXT, Asked, Offsets, choice, echoed, head, text_logprobs, usage
from fw.inference.results import Completion, Delta, Result
from fw.server import large
from fw.server.api import Api, Begun
from fw.server.engine import Ticket
from fw.server.errors import wrong
from fw.server.schemas import CompletionRequest
from fw.server.streaming import DONE, event

_MOST_LOGPROBS = 1 << 20
"""Of tokens of prompts and of the likeliest in their places: so many take some hundred bytes each until they are written."""


async def begin(api: Api, body: CompletionRequest, priority: int = 0) -> Begun:
    """Give it to an engine.

    Raises:
        ApiError: it cannot be answered.
    """
    adapter = api.adapter(body.model)
    given = body.model_dump(exclude_none=True, by_alias=True)
    options = given.pop("stream_options", {})
    for name in ("stream", "suffix"):
        given.pop(name, None)
    prompts = api.prompts(given["prompt"])
    of = replace(api.asked(TEXT, {**given, "prompt": prompts[0]}), adapter=adapter)
    ids = await api.encode(prompts)
    if of.echo and of.sampling.logprobs is not None:
        _check_echo(sum(map(len, ids)), of.sampling.logprobs, of.sampling.n)
    tickets = api.submit(ids, of.sampling, adapter, priority)
    each_of = [replace(of, prompt=prompt) for prompt in prompts]
    name = body.model or api.settings.name
    return Begun(
        tickets,
        lambda results: _whole(api, each_of, results, tickets[0].key, name),
        lambda: _events(api, each_of, ids, tickets, name, bool(options.get("include_usage"))),
    )


def _check_echo(tokens: int, logprobs: int, answers: int) -> None:
    if tokens * (logprobs + 1) * answers > _MOST_LOGPROBS:
        each = f"{logprobs + 1} log-probabilities in each of {answers} answers" if answers > 1 else f"{logprobs + 1} log-probabilities"
        raise wrong(
            f"logprobs: {tokens} tokens of prompts that are echoed, with {each}, are more than the {_MOST_LOGPROBS:,} that one request"
            " may ask for; ask for fewer, or of fewer prompts at once",
            "logprobs",
        )


def _whole(api: Api, each_of: Sequence[Asked], results: Sequence[Result], key: str, name: str) -> dict[str, Any]:
    choices = []
    for number, (of, result) in enumerate(zip(each_of, results, strict=True)):
        for completion in result.completions:
            choices.append({**choice(api, of, result, completion), "index": number * of.sampling.n + completion.index})
    for index, one in enumerate(choices):
        one["index"] = index  # of the best of several, which keep the numbers they had
    return {**head(False, key, name), "object": "text_completion", "choices": choices, "usage": usage(results)}


async def _events(
    api: Api, each_of: Sequence[Asked], ids: Sequence[Sequence[int]], tickets: Sequence[Ticket], name: str, with_usage: bool
) -> AsyncGenerator[bytes, None]:
    begin = {**head(False, tickets[0].key, name), "object": "text_completion"}
    first = each_of[0]
    n, wants = first.sampling.n, first.sampling.logprobs is not None
    # Which answers are given, and what is known of the prompt, is known in the end.
    late = first.sampling.drawn > n or (first.echo and wants)
    begun: set[int] = set()
    offsets: dict[int, Offsets] = {}
    results: list[Result] = []

    def one(index: int, text: str, logprobs: Any, reason: str | None) -> bytes:
        return event({**begin, "choices": [{"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}]})

    def whole(index: int, of: Asked, result: Result, completion: Completion) -> bytes:
        """An answer in one piece."""
        made = choice(api, of, result, completion)
        piece = {"index": index, "text": made["text"], "logprobs": made["logprobs"], "finish_reason": made["finish_reason"]}
        return b"data: " + large.written({**begin, "choices": [piece]}) + b"\n\n"

    if with_usage:
        begin["usage"] = None  # of each piece but the last
    async with aclosing(api.merged(tickets)) as told:
        async for number, each in told:
            of = each_of[number]
            if isinstance(each, Result):
                results.append(each)
                for at, completion in enumerate(each.completions if late else ()):
                    yield await large.beside([each], partial(whole, number * n + at, of, each, completion))
            elif not late:
                index = number * n + each.index
                if index not in begun and of.echo:
                    yield one(index, echoed(api, of, ids[number]), None, None)
                begun.add(index)
                if index not in offsets:
                    offsets[index] = Offsets(api.tokenizer, of.sampling.skip_special_tokens, after=ids[number])
                logprobs = _logprobs(api, each, offsets[index]) if wants else None
                if each.text or each.finish_reason or logprobs:
                    yield one(index, each.text, logprobs, each.finish_reason)
    if with_usage:
        yield event({**begin, "choices": [], "usage": usage(results)})
    yield DONE


def _logprobs(api: Api, delta: Delta, at: Offsets) -> dict[str, Any] | None:
    return None if delta.token is None else text_logprobs(api, [(delta.token, delta.logprob, delta.top)], [at.next(delta.token)])
