"""What is small: embeddings, tokens, adapters, models."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fw.errors import UserError
from fw.inference.options import Sampling
from fw.inference.results import Result
from fw.locate import ADAPTER_CONFIG, confined, inside
from fw.server import large
from fw.server.api import Api, Begun, Part
from fw.server.chat import conversation
from fw.server.engine import Ticket
from fw.server.errors import ApiError, not_found, wrong
from fw.server.logs import note
from fw.server.schemas import (
    DetokenizeRequest,
    DropAdapterRequest,
    EmbeddingRequest,
    LoadAdapterRequest,
    TokenizeRequest,
)
from fw.server.tokens import check_length, decode, encode_all
from fw.server.watching import while_there

_NO_ANSWER = Sampling(max_tokens=0, logprobs=None)


async def embeddings(api: Api, request: Request, body: EmbeddingRequest) -> Response:
    """``POST /v1/embeddings``: hidden states of each text as one; their mean, of length 1, unless something else is asked for."""
    begun = await begin_embeddings(api, body)

    def end() -> None:
        api.leave(begun.tickets)
        begun.end()

    results = await while_there(request.receive, api.all_results(begun), api.settings.serve.timeout, end)
    return await large.response(begun.whole, results)


async def begin_embeddings(api: Api, body: EmbeddingRequest, priority: int = 0) -> Begun:
    """Give it to an engine. No more texts at once than are computed at once: many leave the queue to others.

    Raises:
        ApiError: it cannot be answered.
    """
    adapter, ids = await _texts(api, body)
    pooling, most = body.pooling or "mean", api.engines.most
    api.engines.check(ids, _NO_ANSWER, pooling)
    parts = [ids[first : first + most] for first in range(0, len(ids), most)]
    tickets = api.submit(parts[0], _NO_ANSWER, adapter, priority, pooling)
    note(prompt_tokens=sum(map(len, ids)))
    held = api.engines.hold(adapter) if adapter is not None and parts[1:] else None

    def part(texts: list[list[int]]) -> Part:
        def begin() -> list[Ticket]:
            _check_dimensions(api, body)
            return api.engines.go_on(texts, _NO_ANSWER, adapter, priority, pooling, held)

        return Part(len(texts), begin)

    def end() -> None:
        if held is not None:
            api.engines.release(held)

    return Begun(tickets, lambda results: _embedded(api, body, results), _never, later=[part(texts) for texts in parts[1:]], end=end)


async def _texts(api: Api, body: EmbeddingRequest) -> tuple[str | None, list[list[int]]]:
    """The adapter that is asked for, and ids of the texts."""
    adapter = api.adapter(body.model)
    if not api.engines.facts.shows_hidden_states:
        raise wrong("hidden states of this model are not to be had, so it gives no embeddings", "model")
    _check_dimensions(api, body)
    return adapter, await api.encode(api.prompts(body.input, "input"), "input")


def _check_dimensions(api: Api, body: EmbeddingRequest) -> None:
    """As soon as it is known how many there are."""
    if body.dimensions is not None and api.hidden_size is not None and body.dimensions > api.hidden_size:
        raise wrong(f"dimensions: {body.dimensions} are more than the model has, {api.hidden_size}", "dimensions")


def _never() -> AsyncGenerator[bytes, None]:
    raise AssertionError("embeddings do not come in pieces")


def _embedded(api: Api, body: EmbeddingRequest, results: Sequence[Result]) -> dict[str, Any]:
    _check_dimensions(api, body)
    found = []
    for index, result in enumerate(results):
        values = list(result.embedding[: body.dimensions])
        if body.normalize is not False:
            length = math.sqrt(sum(value * value for value in values)) or 1.0
            values = [value / length for value in values]
        told: list[float] | str = values
        if body.encoding_format == "base64":
            told = base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
        found.append({"object": "embedding", "index": index, "embedding": told})
    tokens = sum(len(result.prompt_token_ids) for result in results)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": found, "model": body.model or api.settings.name, "usage": usage}


async def tokenize(api: Api, body: TokenizeRequest) -> Response:
    """``POST /tokenize``: as a request with the same prompt or messages is read."""
    api.adapter(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise wrong("give either prompt or messages", "prompt")
    if body.messages is not None:
        ids = await conversation(api, body.messages, body.tools, body)
    else:
        assert body.prompt is not None
        check_length(api.tokenizer, [body.prompt], api.most_tokens, "prompt")
        try:
            (ids,) = await encode_all(api.tokenizer, [body.prompt], body.add_special_tokens is not False)
        except UserError as error:
            raise wrong(str(error), "prompt") from None
    return JSONResponse({"count": len(ids), "max_model_len": api.engines.facts.context, "tokens": ids})


async def detokenize(api: Api, body: DetokenizeRequest) -> Response:
    """``POST /detokenize``."""
    api.adapter(body.model)
    if strange := [token for token in body.tokens if token >= api.engines.facts.vocab_size]:
        raise wrong(f"tokens: {strange[0]} is none of the model's {api.engines.facts.vocab_size}", "tokens")
    return JSONResponse({"prompt": await decode(api.tokenizer, body.tokens)})


async def load_adapter(api: Api, body: LoadAdapterRequest) -> Response:
    """``POST /v1/load_lora_adapter``: requests may ask for it from now on."""
    allowed = api.settings.serve.adapters_dir
    if not allowed:
        raise ApiError(403, "this server loads no adapters; start it with serve.adapters_dir=DIR", "not_allowed")
    root = Path(allowed).expanduser().resolve()
    try:
        directory = (root / body.lora_path).resolve()
        there = directory.is_relative_to(root) and directory != root and directory.is_dir()
        if there and (found := inside(directory, ADAPTER_CONFIG)) is not None:
            directory = found.resolve()
            there = confined(directory, root)
    except (OSError, ValueError, RuntimeError):  # a name too long, with a zero byte, links in a circle
        there = False
    if not there:
        raise not_found(f"there is no adapter '{body.lora_path}' in the directory that this server loads adapters from", "lora_path")
    await api.engines.load_adapter(body.lora_name, str(directory))
    return JSONResponse({"status": "loaded"})


async def drop_adapter(api: Api, body: DropAdapterRequest) -> Response:
    """``POST /v1/unload_lora_adapter``: no request may ask for it any more."""
    if not api.settings.serve.adapters_dir:
        raise ApiError(403, "this server loads no adapters; start it with serve.adapters_dir=DIR", "not_allowed")
    await api.engines.drop_adapter(body.lora_name)
    return JSONResponse({"status": "unloaded"})


def models(api: Api) -> Response:
    """``GET /v1/models``: the model, and its adapters."""
    cards = [_card(api, name) for name in (api.settings.name, *api.adapters)]
    return JSONResponse({"object": "list", "data": cards})


def model(api: Api, name: str) -> Response:
    """``GET /v1/models/{model}``."""
    api.adapter(name)
    return JSONResponse(_card(api, name))


def _card(api: Api, name: str) -> dict[str, object]:
    parent = None if name == api.settings.name else api.settings.name
    context = api.engines.facts.context
    return {"id": name, "object": "model", "created": api.created, "owned_by": "fw", "max_model_len": context, "parent": parent}
