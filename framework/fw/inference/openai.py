"""Requests and answers as OpenAI's interface has them: chat completions and completions (https://platform.openai.com/docs/api-reference)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from fw.errors import UserError, did_you_mean
from fw.inference.asking import Model, Prompt, over, sampling
from fw.inference.options import Sampling
from fw.inference.results import Completion, Result
from fw.tokenizer import TextStream, Tokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_SAME = (
    "temperature",
    "top_p",
    "n",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    # beyond OpenAI's, by the names that other servers have for them
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "stop_token_ids",
    "logit_bias",
    "prompt_logprobs",
    "prompt_logprobs_from",
    "json_schema",
    "regex",
    "grammar",
)
_WITHOUT_EFFECT = ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""What says who asks or what is kept, not what is answered."""
_LOST = 64
"""Characters of white space that a special token may have taken from a text."""


@dataclass(frozen=True)
class Asked:
    """A request's body, understood.

    Attributes:
        chat: whether it is a chat completion.
        echo: whether the prompt is to be repeated before the answer.
        adapter: one that is loaded; in OpenAI's format, where ``model`` is its name.
    """

    prompt: Prompt
    sampling: Sampling
    chat: bool
    echo: bool = False
    adapter: str | None = None


def asked(model: Model, url: str, body: Mapping[str, Any], otherwise: Mapping[str, Any] | None = None) -> Asked:
    """Understand a body.

    Args:
        otherwise: settings that it has where it does not say.

    Raises:
        UserError: a field that is missing, wrong, or not honoured.
    """
    chat = url == CHAT
    if not chat and url != TEXT:
        raise UserError(f"url: '{url}' is neither {CHAT} nor {TEXT}")
    rest = {key: value for key, value in body.items() if value is not None and key not in _WITHOUT_EFFECT}
    given = "messages" if chat else "prompt"
    if given not in rest:
        raise UserError(f"a body for {url} has '{given}'")
    prompt = rest.pop(given)
    settings: dict[str, Any] = {key: rest.pop(key) for key in _SAME if key in rest}
    for name in ("max_tokens", "max_completion_tokens"):
        if name in rest:
            settings["max_tokens"] = rest.pop(name)
    if settings.get("top_p") == 0:  # OpenAI's word for the likeliest alone
        settings["top_p"] = sys.float_info.min
    said = otherwise or {}
    if "max_tokens" not in settings and "max_tokens" not in said:
        settings["max_tokens"] = None if chat else 16
    says_logprobs = "logprobs" in rest or "top_logprobs" in rest or "logprobs" not in said
    logprobs = _logprobs(rest, chat)
    if says_logprobs:
        settings["logprobs"] = logprobs
    form = _form(rest.pop("response_format", None))
    if form and "json_schema" in settings:
        raise UserError("response_format and json_schema: an answer has one form; give one of them")
    settings |= form
    settings = over(said, settings)
    if not chat and "best_of" in rest:
        settings["best_of"] = rest.pop("best_of")
    echo = not chat and bool(rest.pop("echo", False))
    if echo and settings["logprobs"] is not None:
        settings["prompt_logprobs"] = settings["logprobs"]
    if rest.pop("stream", False):
        raise UserError("stream: a line of a batch is answered as a whole")
    if rest:
        name = next(iter(rest))
        raise UserError(f"'{name}' is not honoured{did_you_mean(name, [*_SAME, 'max_tokens', 'logprobs'])}; leave it out")
    adapter = body.get("model")
    return Asked(prompt, sampling(model.defaults, settings), chat, echo, adapter if adapter in model.adapters else None)


def plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: one text, and arguments of calls as objects.

    Raises:
        UserError: its content is more than text, or the arguments of a call are no JSON.
    """
    told = {name: value for name, value in message.items() if value is not None}
    content = told.setdefault("content", "")
    if isinstance(content, list):
        if not all(isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content):
            raise UserError("messages: content has parts that are no text; models here read text alone")
        told["content"] = "\n".join(part["text"] for part in content)
    elif not isinstance(content, str):
        raise UserError(f"messages: content {content!r} is neither a text nor a list of parts with text")
    if told.get("role") == "developer":
        told["role"] = "system"
    if isinstance(calls := told.get("tool_calls"), list):
        told["tool_calls"] = [_for_template(call) for call in calls]
    return told


def _for_template(call: Any) -> Any:
    """A call that was made, with arguments as an object, which is what templates write."""
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(arguments, str):
        return call
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        raise UserError(f"messages: the arguments of a call are no JSON: {arguments[:80]}") from None
    assert function is not None
    return {**call, "function": {**function, "arguments": value}}


def _form(wanted: Any) -> dict[str, Any]:
    """Of the answer, by a ``response_format``."""
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if wanted is None or kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": {"type": "object"}}
    if kind == "json_schema" and isinstance(named := wanted.get("json_schema"), dict) and "schema" in named:
        return {"json_schema": named["schema"]}
    raise UserError(f"response_format: {wanted!r} is neither text, nor json_object, nor a json_schema with its schema")


def _logprobs(rest: dict[str, Any], chat: bool) -> int | None:
    """Of chats a switch and a number, of completions a number."""
    wanted = rest.pop("logprobs", None)
    if not chat:
        return wanted
    top: int = rest.pop("top_logprobs", 0)
    if top and not wanted:
        raise UserError("top_logprobs: they stand beside those of the tokens; set logprobs: true, or leave them out")
    return top if wanted else None


def answered(model: Model, of: Asked, result: Result, name: str) -> dict[str, Any]:
    """The body of an answer."""
    return {
        **head(of.chat, result.key, name),
        "object": "chat.completion" if of.chat else "text_completion",
        "choices": [choice(model, of, result, completion) for completion in result.completions],
        "usage": usage([result]),
    }


def head(chat: bool, key: str, name: str) -> dict[str, Any]:
    """What answers begin with."""
    return {"id": f"{'chatcmpl' if chat else 'cmpl'}-{key.replace(' ', '-')}", "created": int(time.time()), "model": name}


def usage(results: Sequence[Result]) -> dict[str, Any]:
    """Tokens of prompts and answers."""
    prompt = sum(len(result.prompt_token_ids) for result in results)
    own = sum(result.generated_tokens for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": own,
        "total_tokens": prompt + own,
        "prompt_tokens_details": {"cached_tokens": sum(result.cached_tokens for result in results)},
    }


def choice(model: Model, of: Asked, result: Result, completion: Completion) -> dict[str, Any]:
    """One of the answers."""
    common = {"index": completion.index, "finish_reason": completion.finish_reason}
    tokens: list[Told] = list(zip(completion.token_ids, completion.logprobs, completion.top_logprobs or repeat({}), strict=False))
    wanted = of.sampling.logprobs is not None
    if of.chat:
        told = {"content": chat_logprobs(model, tokens)} if wanted else None
        return {**common, "message": {"role": "assistant", "content": completion.text}, "logprobs": told}
    before = echoed(model, of, result.prompt_token_ids) if of.echo else ""
    text = before + completion.text
    if not wanted:
        return {**common, "text": text, "logprobs": None}
    own = Offsets(model.tokenizer, of.sampling.skip_special_tokens, len(before), result.prompt_token_ids)
    offsets = [own.next(token) for token, _, _ in tokens]
    if of.echo:
        of_prompt = _OffsetsIn(model.tokenizer, of.prompt) if isinstance(of.prompt, str) else Offsets(model.tokenizer)
        offsets = [*map(of_prompt.next, result.prompt_token_ids), *offsets]
        tokens = [*prompt_tokens(result), *tokens]
    return {**common, "text": text, "logprobs": text_logprobs(model, tokens, offsets)}


def echoed(model: Model, of: Asked, ids: Sequence[int]) -> str:
    """The prompt, as it was given where that was a text."""
    return of.prompt if isinstance(of.prompt, str) else model.tokenizer.decode(ids, skip_special_tokens=True)


Told = tuple[int, float | None, Mapping[int, float]]
"""A token, its log-probability, and those of the likeliest in its place."""


def prompt_tokens(result: Result) -> list[Told]:
    """Of the prompt, where log-probabilities of it were asked for; nothing is known of its first one, or of more where these were not."""
    unknown = len(result.prompt_token_ids) - len(result.prompt_logprobs)
    logprobs: list[float | None] = [None] * unknown + list(result.prompt_logprobs)
    tops: list[Mapping[int, float]] = [*([{}] * unknown), *(result.prompt_top_logprobs or [{}] * len(result.prompt_logprobs))]
    return list(zip(result.prompt_token_ids, logprobs, tops, strict=True))


def chat_logprobs(model: Model, tokens: Iterable[Told]) -> list[dict[str, Any]]:
    """As chat completions have them."""

    def one(token: int, logprob: float | None) -> dict[str, Any]:
        own = model.tokenizer.token_bytes(token)
        return {"token": own.decode(errors="replace"), "logprob": logprob, "bytes": list(own)}

    return [{**one(token, logprob), "top_logprobs": [one(other, its) for other, its in top.items()]} for token, logprob, top in tokens]


class Offsets:
    """Where tokens stand in their text, one after another: characters may be of several tokens, of which the last one has it.

    Args:
        skip_special_tokens: the text is without them.
        begin: where it begins, in characters.
        after: tokens before it, with which it is one text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, begin: int = 0, after: Sequence[int] = ()) -> None:
        self._stream = TextStream(tokenizer, skip_special_tokens=skip_special_tokens, after=after)
        self._at = begin

    def next(self, token: int) -> int:
        """Of the next one."""
        at = self._at
        self._at += len(self._stream.push(token))
        return at


class _OffsetsIn(Offsets):
    """Likewise, where the text is not made of the tokens, but they of it: special ones may not be in it, and white space may be lost."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        super().__init__(tokenizer, skip_special_tokens=False)
        self._tokenizer, self._text = tokenizer, text

    def next(self, token: int) -> int:
        """Of the next one."""
        if token in self._tokenizer.special_ids and self._found(self._tokenizer.id_to_token(token) or "") is None:
            return self._at
        piece = self._stream.push(token)
        at, self._at = self._found(piece) or (self._at, min(self._at + len(piece), len(self._text)))
        return at

    def _found(self, piece: str) -> tuple[int, int] | None:
        """From where to where it stands here."""
        near = self._text[self._at : self._at + _LOST]
        for at in (self._at, self._at + len(near) - len(near.lstrip())):
            for each in (piece, piece.lstrip(" ")):
                if self._text.startswith(each, at) and (each or not piece):
                    return at, at + len(each)
        return None


def text_logprobs(model: Model, tokens: Iterable[Told], offsets: Sequence[int]) -> dict[str, Any]:
    """As completions have them. A token that is no text of its own is written ``bytes:\\xNN``.

    Args:
        offsets: of these tokens.
    """
    known, texts, logprobs, tops = model.tokenizer, [], [], []
    for token, logprob, top in tokens:
        texts.append(_name(known, token))
        logprobs.append(logprob)
        named = {_name(known, other): its for other, its in top.items()}
        # Of equal names, which only byte tokens and text may have, the likelier one is kept: it comes first.
        tops.append({**named, **({texts[-1]: logprob} if top and logprob is not None and texts[-1] not in named else {})} or None)
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops if any(tops) else None, "text_offset": list(offsets)}


def _name(tokenizer: Tokenizer, token: int) -> str:
    own = tokenizer.token_bytes(token)
    try:
        return own.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)
