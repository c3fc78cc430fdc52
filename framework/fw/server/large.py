"""Bodies of answers that are large, as log-probabilities of a long prompt are: made and written beside the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from starlette.responses import JSONResponse, Response

from fw.inference.results import Result

LARGE = 5_000
"""Tokens, log-probabilities and numbers of embeddings that are worth a thread."""
_AT_ONCE, _SMALL = 100, 250
"""Items of a list that are written together, and values in each of them: nothing else runs meanwhile, not even in another thread."""
_T = TypeVar("_T")
_plain = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def is_large(results: Sequence[Result]) -> bool:
    """Whether it takes long to make a body of them."""
    return sum(map(_size, results)) > LARGE


def _size(result: Result) -> int:
    tops = [result.prompt_top_logprobs, *(each.top_logprobs for each in result.completions)]
    told = sum(len(top) * (len(top[0]) + 1) for top in tops if top)
    return told + len(result.prompt_token_ids) + result.generated_tokens + len(result.embedding)


async def beside(results: Sequence[Result], made: Callable[[], _T]) -> _T:
    """What a function makes of results, in a thread if they are large."""
    return await asyncio.to_thread(made) if is_large(results) else made()


async def response(whole: Callable[[Sequence[Result]], dict[str, Any]], results: Sequence[Result]) -> Response:
    """With the body that is made of results."""
    if not is_large(results):
        return JSONResponse(whole(results))
    return Response(await asyncio.to_thread(lambda: written(whole(results))), media_type="application/json")


def written(value: Any, encode: Callable[[Any], str] = _plain) -> bytes:
    """JSON of a value, as ``encode`` writes it, but never much of it in one go."""
    return "".join(_pieces(value, encode)).encode("utf-8", "replace")


def _pieces(value: Any, encode: Callable[[Any], str]) -> Iterator[str]:
    if _is_small(value):
        yield encode(value)
    elif isinstance(value, Mapping):
        before = "{"
        for key, each in value.items():
            yield f"{before}{encode(key)}:"
            yield from _pieces(each, encode)
            before = ","
        yield "}"
    else:
        before = "["
        for first in range(0, len(value), _AT_ONCE):
            part = value[first : first + _AT_ONCE]
            if all(map(_is_small, part)):
                yield before + encode(part)[1:-1]
            else:
                for number, each in enumerate(part):
                    yield "," if number else before
                    yield from _pieces(each, encode)
            before = ","
        yield "]"


def _is_small(value: Any) -> bool:
    return _leaves(value) <= _SMALL


def _leaves(value: Any) -> int:
    """How many there are; of more than are few, that they are more."""
    if not isinstance(value, Mapping | list):
        return 1
    if len(value) > _SMALL:
        return len(value)
    found = 0
    for each in value.values() if isinstance(value, Mapping) else value:
        found += _leaves(each) if isinstance(each, Mapping | list) else 1
        if found > _SMALL:
            break
    return found
