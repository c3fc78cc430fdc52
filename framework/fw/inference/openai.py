"""Requests and answers as OpenAI's interface has them: chat completions and completions (https://platform.openai.com/docs/api-reference)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fw.errors import UserError, did_you_mean
from fw.inference.engine import Completion, Result
from fw.inference.llm import LLM, Prompt
from fw.inference.options import Sampling

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
    "stop_token_ids",
    "logit_bias",
    "prompt_logprobs",
    "json_schema",
    "regex",
    "grammar",
)
_WITHOUT_EFFECT = ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""What says who asks or what is kept, not what is answered."""


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


def asked(llm: LLM, url: str, body: Mapping[str, Any]) -> Asked:
    """Understand a body.

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
    if "max_tokens" not in settings:
        settings["max_tokens"] = None if chat else 16
    settings["logprobs"] = _logprobs(rest, chat)
    settings |= _form(rest.pop("response_format", None))
    if not chat and "best_of" in rest:
        settings["best_of"] = rest.pop("best_of")
    echo = bool(rest.pop("echo", False)) and not chat
    if rest.pop("stream", False):
        raise UserError("stream: a line of a batch is answered as a whole")
    if rest:
        name = next(iter(rest))
        raise UserError(f"'{name}' is not honoured{did_you_mean(name, [*_SAME, 'max_tokens', 'logprobs'])}; leave it out")
    model = body.get("model")
    return Asked(prompt, llm.sampling(**settings), chat, echo, model if model in llm.engine.adapters.names else None)


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
    return top if wanted else None


def answered(llm: LLM, of: Asked, result: Result, model: str) -> dict[str, Any]:
    """The body of an answer."""
    choices = [_choice(llm, of, result, completion) for completion in result.completions]
    prompt, own = len(result.prompt_token_ids), sum(len(each.token_ids) for each in result.completions)
    return {
        "id": f"{'chatcmpl' if of.chat else 'cmpl'}-{result.key.replace(' ', '-')}",
        "object": "chat.completion" if of.chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": own,
            "total_tokens": prompt + own,
            "prompt_tokens_details": {"cached_tokens": result.cached_tokens},
        },
    }


def _choice(llm: LLM, of: Asked, result: Result, completion: Completion) -> dict[str, Any]:
    common = {"index": completion.index, "finish_reason": completion.finish_reason}
    if of.chat:
        told = _chat_logprobs(llm, completion) if of.sampling.logprobs is not None else None
        return {**common, "message": {"role": "assistant", "content": completion.text}, "logprobs": told}
    before = llm.tokenizer.decode(result.prompt_token_ids, skip_special_tokens=True) if of.echo else ""
    told = _text_logprobs(llm, completion) if of.sampling.logprobs is not None else None
    return {**common, "text": before + completion.text, "logprobs": told}


def _token(llm: LLM, token: int) -> str:
    return llm.tokenizer.decode([token])


def _chat_logprobs(llm: LLM, completion: Completion) -> dict[str, Any]:
    def one(token: int, logprob: float) -> dict[str, Any]:
        text = _token(llm, token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    tops = completion.top_logprobs or [{} for _ in completion.token_ids]
    return {
        "content": [
            {**one(token, logprob), "top_logprobs": [one(other, its) for other, its in top.items()]}
            for token, logprob, top in zip(completion.token_ids, completion.logprobs, tops, strict=True)
        ]
    }


def _text_logprobs(llm: LLM, completion: Completion) -> dict[str, Any]:
    texts = [_token(llm, token) for token in completion.token_ids]
    at, offsets = 0, []
    for text in texts:
        offsets.append(at)
        at += len(text)
    return {
        "tokens": texts,
        "token_logprobs": completion.logprobs,
        "top_logprobs": [{_token(llm, token): its for token, its in top.items()} for top in completion.top_logprobs] or None,
        "text_offset": offsets,
    }
