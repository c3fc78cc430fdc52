"""``/v1/chat/completions``: conversations."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from fw.errors import UserError
from fw.inference.openai import CHAT, Asked, chat_logprobs, choice, head, plain, usage
from fw.inference.results import Completion, Delta, Result
from fw.server import tool_calls
from fw.server.api import Api, Begun
from fw.server.bodies import check_shapes
from fw.server.engine import Ticket
from fw.server.errors import shown, wrong
from fw.server.schemas import ChatRequest, Message, NamedTool, Tool
from fw.server.streaming import DONE, event
from fw.server.tokens import LONG, check_length, encode_all
from fw.server.tool_calls import Call, Content, Piece, ToolCalls, forced_calls, forced_schema
from fw.tokenizer import Tokenizer

_OF_TEMPLATE = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message", "reasoning_effort", "messages")
_OF_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
_WITHOUT_EFFECT = ("modalities",)
_TAKEN = frozenset(inspect.signature(Tokenizer.apply_chat_template).parameters)


@dataclass(frozen=True)
class Tools:
    """What an answer may call.

    Attributes:
        format: how the model writes calls.
        forced: the answer is a call, in JSON.
        most: calls that are given.
    """

    given: list[dict[str, Any]]
    format: str
    forced: bool
    most: int | None

    def reader(self) -> Reader:
        """For an answer."""
        return _Forced(self) if self.forced else _Found(self)


class Reader(ABC):
    """Tells calls from what is said in one answer."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self.calls = 0

    def push(self, text: str, last: bool) -> list[Piece]:
        """What further text completes; no more calls than are wanted."""
        pieces: list[Piece] = []
        for piece in self._read(text, last):
            if isinstance(piece, Call):
                if self._tools.most is not None and self.calls >= self._tools.most:
                    continue
                self.calls += 1
            pieces.append(piece)
        return pieces

    @abstractmethod
    def _read(self, text: str, last: bool) -> Sequence[Piece]:
        """What further text completes, calls that are not wanted among it."""


class _Found(Reader):
    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._calls = ToolCalls(tools.format, tools.given)

    def _read(self, text: str, last: bool) -> Sequence[Piece]:
        return [*self._calls.push(text), *(self._calls.finish() if last else [])]


class _Forced(Reader):
    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._text = ""

    def _read(self, text: str, last: bool) -> Sequence[Piece]:
        self._text += text
        return forced_calls(self._text, self._tools.format, self._tools.given) or [Content(self._text)] if last else []


@dataclass(frozen=True)
class Chat:
    """A conversation that an engine has.

    Attributes:
        name: of the model, as it was asked for.
    """

    of: Asked
    tools: Tools | None
    ticket: Ticket
    name: str


async def submit(api: Api, body: ChatRequest, priority: int = 0) -> Chat:
    """Give it to an engine.

    Raises:
        ApiError: it cannot be answered.
    """
    adapter = api.adapter(body.model)
    given = body.model_dump(exclude_none=True, by_alias=True)
    tools, changes = _tools(api, body)
    for name in ("stream", "stream_options", *_OF_TEMPLATE, *_OF_TOOLS, *_WITHOUT_EFFECT):
        given.pop(name, None)
    if "json_schema" in changes and any(name in given for name in ("response_format", "json_schema", "regex", "grammar")):
        raise wrong("tool_choice: a call that must be made has a form already; leave out the other one", "tool_choice")
    of = replace(api.asked(CHAT, {**given, **changes, "messages": []}), adapter=adapter)
    ids = await conversation(api, body.messages, body.tools if tools else None, body)
    (ticket,) = api.submit([ids], of.sampling, adapter, priority)
    return Chat(of, tools, ticket, body.model or api.settings.name)


async def begin(api: Api, body: ChatRequest, priority: int = 0) -> Begun:
    """Likewise, to be answered as a chat completion.

    Raises:
        ApiError: it cannot be answered.
    """
    chat = await submit(api, body, priority)
    with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    return Begun(
        [chat.ticket],
        lambda results: _whole(api, chat.of, chat.tools, results[0], chat.ticket.key, chat.name),
        lambda: _events(api, chat.of, chat.tools, chat.ticket, chat.name, with_usage),
    )


async def conversation(api: Api, messages: Sequence[Message], tools: Sequence[Tool] | None, body: Any) -> list[int]:
    """Ids of a conversation, up to where the answer begins.

    Raises:
        ApiError: the model's chat template does not take it.
    """
    variables = dict(body.chat_template_kwargs or {})
    if taken := [name for name in variables if name in _TAKEN]:
        raise wrong(f"chat_template_kwargs: '{shown(taken[0])}' is not the template's to be given", "chat_template_kwargs")
    if (effort := getattr(body, "reasoning_effort", None)) is not None:
        variables.setdefault("reasoning_effort", effort)
    goes_on = bool(getattr(body, "continue_final_message", None))
    begins = body.add_generation_prompt if body.add_generation_prompt is not None else not goes_on
    told = [message.model_dump(exclude_none=True) for message in messages]
    check_shapes([arguments.encode(errors="replace") for message in told for arguments in _arguments(message)])
    plain = [_plain(message) for message in told]
    functions = [tool.model_dump(exclude_none=True) for tool in tools] if tools else None

    def written() -> str:
        return api.tokenizer.apply_chat_template(
            plain,
            tools=functions,
            add_generation_prompt=begins,
            continue_final_message=goes_on,
            tokenize=False,
            **variables,
        )

    try:
        size = sum(len(str(each)) for each in (plain, functions, variables))
        text = await asyncio.to_thread(written) if size > LONG else written()
        check_length(api.tokenizer, [text], api.most_tokens, "messages")
        (found,) = await encode_all(api.tokenizer, [text], add_special_tokens=False)
    except UserError as error:
        raise wrong(str(error), "messages") from None
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:  # what a template's own code makes of odd messages
        raise wrong(f"the model's chat template does not take these messages: {type(error).__name__}: {error}", "messages") from None
    if not found:
        raise wrong("messages: the chat template makes no token of them", "messages")
    return found


def _arguments(message: Mapping[str, Any]) -> Iterator[str]:
    """Of functions that it calls, in JSON."""
    for call in message.get("tool_calls", ()):
        if isinstance(function := call.get("function"), dict) and isinstance(arguments := function.get("arguments"), str):
            yield arguments


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """As templates expect it."""
    try:
        return plain(message)
    except UserError as error:
        raise wrong(str(error), "messages") from None


def _tools(api: Api, body: ChatRequest) -> tuple[Tools | None, dict[str, Any]]:
    """What may be called, and what that changes of how the answer is generated."""
    chosen: Any = body.tool_choice.model_dump() if isinstance(body.tool_choice, NamedTool) else body.tool_choice
    given = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    try:
        tool_calls.check_tools(given, chosen)
    except UserError as error:
        raise wrong(str(error), "tools") from None
    if not given or chosen == "none":
        return None, {}
    most = 1 if body.parallel_tool_calls is False else None
    family = api.tool_format
    if chosen in (None, "auto"):
        if family is None:
            raise wrong("tools: the model's chat template knows no tools; leave them out, or choose one by tool_choice", "tools")
        special = any(api.tokenizer.token_to_id(marker) in api.tokenizer.special_ids for marker in tool_calls.format_named(family).markers)
        if special and body.skip_special_tokens:
            raise wrong("skip_special_tokens: the model writes calls with some; leave it out, or the tools", "skip_special_tokens")
        return Tools(given, family, False, most), {"skip_special_tokens": False} if special else {}
    name = chosen["function"]["name"] if isinstance(chosen, dict) else None
    return Tools(given, family or "hermes", True, most), {"json_schema": forced_schema(family or "hermes", given, name)}


def _whole(api: Api, of: Asked, tools: Tools | None, result: Result, key: str, name: str) -> dict[str, Any]:
    choices = [_choice(api, of, tools, result, completion) for completion in result.completions]
    for index, one in enumerate(choices):
        one["index"] = index
    return {**head(True, key, name), "object": "chat.completion", "choices": choices, "usage": usage([result])}


def _choice(api: Api, of: Asked, tools: Tools | None, result: Result, completion: Completion) -> dict[str, Any]:
    found = choice(api, of, result, completion)
    found["message"]["refusal"] = None  # fw has no word for one
    if tools is None:
        return found
    pieces = tools.reader().push(completion.text, last=True)
    text = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    calls = [_call(piece) for piece in pieces if isinstance(piece, Call)]
    if calls:
        found["message"] = {"role": "assistant", "content": text or None, "refusal": None, "tool_calls": calls}
        found["finish_reason"] = "tool_calls" if completion.finish_reason == "stop" else completion.finish_reason
    return found


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


async def _events(api: Api, of: Asked, tools: Tools | None, ticket: Ticket, name: str, with_usage: bool) -> AsyncGenerator[bytes, None]:
    begin = {**head(True, ticket.key, name), "object": "chat.completion.chunk", **({"usage": None} if with_usage else {})}
    wants = of.sampling.logprobs is not None
    late = of.sampling.drawn > of.sampling.n
    readers: dict[int, Reader | None] = {}
    result: Result | None = None

    def one(index: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> bytes:
        return event({**begin, "choices": [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}]})

    async with aclosing(api.follow(ticket)) as told:
        async for each in told:
            if isinstance(each, Result):
                result = each
                continue
            if late:
                continue
            if each.index not in readers:
                readers[each.index] = None if tools is None else tools.reader()
                yield one(each.index, {"role": "assistant", "content": "", "refusal": None})
            reader = readers[each.index]
            pieces: Sequence[Piece] = [Content(each.text)] if reader is None else reader.push(each.text, each.finish_reason is not None)
            logprobs = {"content": chat_logprobs(api, [told_of(each)])} if wants and each.token is not None else None
            for piece in pieces:
                if isinstance(piece, Call):
                    yield one(each.index, {"tool_calls": [{"index": piece.index, **_call(piece)}]})
                elif piece.text or logprobs:
                    yield one(each.index, {"content": piece.text}, logprobs=logprobs)
                    logprobs = None
            if logprobs:
                yield one(each.index, {"content": ""}, logprobs=logprobs)
            if (reason := each.finish_reason) is not None:
                yield one(each.index, {}, "tool_calls" if reason == "stop" and reader is not None and reader.calls else reason)
    assert result is not None
    for at, completion in enumerate(result.completions if late else ()):
        whole = _choice(api, of, tools, result, completion)
        message = whole["message"]
        if "tool_calls" in message:
            message = {**message, "tool_calls": [{"index": n, **call} for n, call in enumerate(message["tool_calls"])]}
        yield one(at, message, logprobs=whole["logprobs"])
        yield one(at, {}, whole["finish_reason"])
    if with_usage:
        yield event({**begin, "choices": [], "usage": usage([result])})
    yield DONE


def told_of(delta: Delta) -> tuple[int, float | None, dict[int, float]]:
    """Its token, with log-probabilities."""
    assert delta.token is not None
    return delta.token, delta.logprob, delta.top
