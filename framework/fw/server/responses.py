"""``/v1/responses``: conversations by OpenAI's later interface; nothing of them is kept.

A request is a chat's in other words, and what comes of it is read as a chat's answer is.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from fw.inference.openai import chat_logprobs, choice, usage
from fw.inference.results import Delta, Result
from fw.server import chat, large
from fw.server.api import Api, Begun
from fw.server.errors import ApiError, wrong
from fw.server.response_schemas import Content as Parts, FunctionCall, InputMessage, NamedFunctionTool, Refusal, ResponseRequest, SchemaForm
from fw.server.schemas import ChatRequest
from fw.server.storage import undivided
from fw.server.streaming import event
from fw.server.tool_calls import Call, Content, Piece

_SAME = (
    "model",
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "stop",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "skip_special_tokens",
    "regex",
    "grammar",
    "chat_template_kwargs",
)
"""Fields that chats have by these names, too."""
_TOLD = ("instructions", "max_output_tokens", "user", "safety_identifier", "prompt_cache_key")
"""Fields that the answer repeats as they are."""
_LARGE = 200
"""Tokens with log-probabilities, each of up to 21, that an event has."""
_TOOL = re.compile(r"^(tools\[\d+\])\.function\b")


class Answer:
    """A response as it comes about, and the events that tell of it.

    Args:
        head: what is known of it from the beginning.
        streams: there are events; of what is asked for as a whole there are none.

    Attributes:
        body: as the last event that has one told it.
    """

    def __init__(self, head: Mapping[str, Any], streams: bool = True) -> None:
        self._streams = streams
        self._id = uuid.uuid4().hex
        self._head = {"id": f"resp_{self._id}", "object": "response", "created_at": int(time.time()), **head}
        self._output: list[dict[str, Any]] = []
        self._told = 0
        self._message: dict[str, Any] | None = None
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self.body = self._state("in_progress")

    def begin(self) -> list[bytes]:
        """Nothing has been said yet."""
        return [self._tell("response.created", response=self.body), self._tell("response.in_progress", response=self.body)]

    def say(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> list[bytes]:
        """Text, and the tokens it was made of where they are asked for."""
        if not text and not logprobs:
            return []
        events = [] if self._message else self._open()
        self._text.append(text)
        self._logprobs += logprobs
        return [*events, self._tell("response.output_text.delta", **self._place(), delta=text, logprobs=list(logprobs))]

    def call(self, call: Call) -> list[bytes]:
        """One that is whole."""
        events = self._close("completed")
        begun = self._item("fc", type="function_call", status="in_progress", call_id=call.id, name=call.name, arguments="")
        done = {**begun, "status": "completed", "arguments": call.arguments}
        at = {"item_id": begun["id"], "output_index": len(self._output)}
        self._output.append(done)
        return [
            *events,
            self._tell("response.output_item.added", output_index=at["output_index"], item=begun),
            self._tell("response.function_call_arguments.delta", **at, delta=call.arguments),
            self._tell("response.function_call_arguments.done", **at, name=call.name, arguments=call.arguments),
            self._tell("response.output_item.done", output_index=at["output_index"], item=done),
        ]

    def finish(self, whole: bool, used: Mapping[str, Any]) -> list[bytes]:
        """Nothing more is said, by the model's own choice or because there is room for no more."""
        status = "completed" if whole else "incomplete"
        events = self._open() if not self._output else []
        events += self._close(status)
        if whole:
            self.body = self._state(status, usage=used, completed_at=int(time.time()))
        else:
            self.body = self._state(status, usage=used, incomplete_details={"reason": "max_output_tokens"})
        return [*events, self._tell(f"response.{status}", response=self.body)]

    def fail(self, error: ApiError) -> list[bytes]:
        """Nothing more is to be had."""
        events = self._close("incomplete")
        told = {"code": "invalid_prompt" if error.status == 400 else "server_error", "message": str(error)}
        self.body = self._state("failed", error=told)
        return [*events, self._tell("response.failed", response=self.body)]

    def _state(self, status: str, **more: Any) -> dict[str, Any]:
        of_no_state = {"error": None, "incomplete_details": None, "usage": None, "completed_at": None}
        return {**self._head, "status": status, "output": self._output, **of_no_state, **more}

    def _item(self, kind: str, **content: Any) -> dict[str, Any]:
        return {"id": f"{kind}_{self._id}_{len(self._output)}", **content}

    def _open(self) -> list[bytes]:
        self._text, self._logprobs = [], []
        self._message = self._item("msg", type="message", status="in_progress", role="assistant", content=[])
        self._output.append(self._message)
        return [
            self._tell("response.output_item.added", output_index=len(self._output) - 1, item=self._message),
            self._tell("response.content_part.added", **self._place(), part=_part("", [])),
        ]

    def _close(self, status: str) -> list[bytes]:
        if (message := self._message) is None:
            return []
        text, place = "".join(self._text), self._place()
        part = _part(text, self._logprobs)
        message |= {"status": status, "content": [part]}
        self._message = None
        return [
            self._tell("response.output_text.done", **place, text=text, logprobs=self._logprobs),
            self._tell("response.content_part.done", **place, part=part),
            self._tell("response.output_item.done", output_index=place["output_index"], item=message),
        ]

    def _place(self) -> dict[str, Any]:
        assert self._message is not None
        return {"item_id": self._message["id"], "output_index": len(self._output) - 1, "content_index": 0}

    def _tell(self, kind: str, **content: Any) -> bytes:
        if not self._streams:
            return b""
        number, self._told = self._told, self._told + 1
        return event({"type": kind, "sequence_number": number, **content}, kind, len(self._logprobs) > _LARGE)


def _part(text: str, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


@dataclass(frozen=True)
class BegunResponse(Begun):
    """A request that engines have, one of whose answers it is.

    Attributes:
        failed: what ends ``events`` where an error comes from elsewhere.
    """

    failed: Callable[[ApiError], bytes]


async def begin(api: Api, body: ResponseRequest, priority: int = 0) -> BegunResponse:
    """Give it to an engine.

    Raises:
        ApiError: it cannot be answered.
    """
    head = _head(body)
    try:
        asked = await chat.submit(api, ChatRequest.model_validate(_as_chat(body)), priority)
    except ApiError as error:
        raise _in_its_words(error) from None
    sampling = asked.of.sampling
    head |= {"model": asked.name, "temperature": sampling.temperature, "top_p": sampling.top_p if body.top_p is None else body.top_p}
    answer = Answer(head, bool(body.stream))
    stream = Stream(api, asked, answer)
    return BegunResponse([asked.ticket], lambda results: _whole(api, asked, answer, results[0]), stream.events, stream.failed)


def register(app: FastAPI, api: Api, told: dict[int | str, dict[str, Any]]) -> None:
    """The route.

    Args:
        told: what it may answer, in the document.
    """

    @app.post("/v1/responses", responses=told, tags=["generation"])
    async def create_response(request: Request, body: ResponseRequest) -> Response:
        begun = await begin(api, body)
        if body.stream:
            return api.streamed(begun.events(), begun.tickets, begun.failed)
        return await large.response(begun.whole, await api.answers(request, begun.tickets))


def _head(body: ResponseRequest) -> dict[str, Any]:
    """What is repeated of a request, or is the same for all."""
    form = body.text.format if body.text is not None else None
    head: dict[str, Any] = {
        **{name: getattr(body, name) for name in _TOLD},
        "text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}, "verbosity": "medium"},
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "tool_choice": body.tool_choice.model_dump() if isinstance(body.tool_choice, NamedFunctionTool) else body.tool_choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "top_logprobs": body.top_logprobs or 0,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
        "metadata": body.metadata or {},
        "truncation": "disabled",
        "service_tier": "default",
        "store": False,
        "background": False,
        "previous_response_id": None,
    }
    try:
        json.dumps(head, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):  # JSON is read with what it has no words for: NaN, half a surrogate pair
        raise wrong(
            "the answer repeats the request, where something is no JSON: half of a surrogate pair, or a number beyond all bounds"
        ) from None
    return head


def _as_chat(body: ResponseRequest) -> dict[str, Any]:
    """A chat's body of the same meaning."""
    given: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    given["messages"] = _messages(body)
    given["max_completion_tokens"] = body.max_output_tokens
    given["reasoning_effort"] = body.reasoning.effort if body.reasoning is not None else None
    if body.text is not None and (form := body.text.format) is not None:
        wanted: dict[str, Any] = {"type": form.type}
        if isinstance(form, SchemaForm):
            wanted["json_schema"] = {"name": form.name, "schema": form.schema_}
        given["response_format"] = wanted
    may_call = bool(body.tools) and body.tool_choice != "none"
    if body.tools:
        given["tools"] = [{"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)} for tool in body.tools]
    # Where there are no tools, a choice of them is fine as long as it is none.
    if body.tools or body.tool_choice not in ("none", "auto"):
        name = body.tool_choice
        given["tool_choice"] = {"type": "function", "function": {"name": name.name}} if isinstance(name, NamedFunctionTool) else name
    if body.include:
        if may_call:
            # Of an answer that is text and calls, it is not known which of its tokens are the text's.
            raise wrong("include: no log-probabilities are given where functions may be called; leave them out, or the tools", "include")
        given |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    elif body.top_logprobs:
        raise wrong('top_logprobs: they are given where include is ["message.output_text.logprobs"]', "top_logprobs")
    return given


def _messages(body: ResponseRequest) -> list[dict[str, Any]]:
    """Items as a chat's messages: what an assistant says and calls one after another is one of them."""
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    names: dict[str, str] = {}
    for item in body.input:
        if isinstance(item, InputMessage):
            messages.append({"role": item.role, "content": _texts(item.content)})
        elif isinstance(item, FunctionCall):
            names[item.call_id] = item.name
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
            function = {"name": item.name, "arguments": item.arguments}
            messages[-1].setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        elif item.call_id not in names:
            raise wrong(f"No tool call found for function call output with call_id {item.call_id!r}; give the call, too", "input")
        else:
            about = {"tool_call_id": item.call_id, "name": names[item.call_id]}
            messages.append({"role": "tool", **about, "content": _texts(item.output)})
    return messages


def _texts(parts: Parts) -> list[dict[str, str]]:
    return [{"type": "text", "text": part.refusal if isinstance(part, Refusal) else part.text} for part in parts]


def _in_its_words(error: ApiError) -> ApiError:
    """As whoever asked in this interface's words can read it."""
    text = _TOOL.sub(r"\1", re.sub(r"^messages\b", "input", str(error)))
    return ApiError(error.status, text, error.code, "input" if error.param == "messages" else error.param, error.retry_after)


def _whole(api: Api, asked: chat.Chat, answer: Answer, result: Result) -> dict[str, Any]:
    completion = result.completions[0]
    pieces: Sequence[Piece] = [Content(completion.text)] if asked.tools is None else asked.tools.reader().push(completion.text, last=True)
    logprobs = choice(api, asked.of, result, completion)["logprobs"]
    _tell(answer, pieces, logprobs["content"] if logprobs else ())
    _finish(answer, result)
    return answer.body


def _finish(answer: Answer, result: Result) -> list[bytes]:
    return answer.finish(result.completions[0].finish_reason == "stop", _usage(result))


class Stream:
    """An answer's events as they come, none of which is left out, however they end."""

    def __init__(self, api: Api, asked: chat.Chat, answer: Answer) -> None:
        self._api, self._asked, self._answer = api, asked, answer
        self._unsent: deque[bytes] = deque()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """One by one; whoever asks for the next has sent the last.

        Raises:
            ApiError: there is no answer, of which nothing has been told yet.
        """
        api, asked, answer = self._api, self._asked, self._answer
        reader = None if asked.tools is None else asked.tools.reader()
        wants = asked.of.sampling.logprobs is not None
        begun = False
        try:
            async with aclosing(api.follow(asked.ticket)) as told:
                async for each in told:
                    if not begun:
                        self._unsent += answer.begin()
                        begun = True
                    if isinstance(each, Delta):
                        pieces = [Content(each.text)] if reader is None else reader.push(each.text, each.finish_reason is not None)
                        logprobs = chat_logprobs(api, [chat.told_of(each)]) if wants and each.token is not None else ()
                        self._unsent += _tell(answer, pieces, logprobs)
                    else:
                        self._unsent += await undivided(large.beside([each], partial(_finish, answer, each)))
                    while self._unsent:
                        yield self._unsent[0]
                        self._unsent.popleft()
        except ApiError as error:
            if not begun:  # the status says it
                raise
            self._unsent += answer.fail(error)
        while self._unsent:
            yield self._unsent[0]
            self._unsent.popleft()

    def failed(self, error: ApiError) -> bytes:
        """What is still to be sent where an error has stopped the sending: the answer has failed, unless it had ended."""
        if self._answer.body["status"] == "in_progress":
            self._unsent += self._answer.fail(error)
        return b"".join(self._unsent)


def _tell(answer: Answer, pieces: Sequence[Piece], logprobs: Sequence[dict[str, Any]]) -> list[bytes]:
    """Pieces of an answer; log-probabilities are only of one that is text."""
    events: list[bytes] = []
    for piece in pieces:
        events += answer.call(piece) if isinstance(piece, Call) else answer.say(piece.text, logprobs)
    return events


def _usage(result: Result) -> dict[str, Any]:
    used = usage([result])
    return {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": {**used["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": used["total_tokens"],
    }
