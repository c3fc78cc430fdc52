"""Tokens of texts and texts of tokens, beside the event loop where that takes long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache

from fw.server.errors import wrong
from fw.tokenizer import Tokenizer

LONG = 20_000
"""Characters, or tokens, that are worth a thread. In it texts are encoded as a batch, for which the tokenizers library lets others run."""

_AT_ONCE = 1 << 20
"""Characters that are encoded together: until they are ids, they take a hundred times as many bytes."""


async def encode_all(tokenizer: Tokenizer, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
    """Ids of texts.

    Raises:
        UserError: one is no text.
    """
    if sum(map(len, texts)) > LONG:
        return await asyncio.to_thread(_encode_long, tokenizer, texts, add_special_tokens)
    return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]


def _encode_long(tokenizer: Tokenizer, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
    found: list[list[int]] = []
    while len(found) < len(texts):
        size, last = 0, len(found)
        while last < len(texts) and (size := size + len(texts[last])) <= _AT_ONCE:
            last += 1
        part = texts[len(found) : max(last, len(found) + 1)]
        found += tokenizer.encode_all(part, add_special_tokens=add_special_tokens)
    return found


async def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Text of ids."""
    return await asyncio.to_thread(tokenizer.decode, ids) if len(ids) > LONG else tokenizer.decode(ids)


def check_length(tokenizer: Tokenizer, texts: Sequence[str], tokens: int, param: str) -> None:
    """Before work is put into it, each text may be short enough: it has no more characters than so many of the longest token.

    Raises:
        ApiError: one has.
    """
    longest = max(map(len, texts), default=0)
    if longest > tokens and longest > (most := tokens * _longest(tokenizer)):
        raise wrong(
            f"{param}: {longest} characters are more than the {most} of {tokens} of the longest token; this server reads no more",
            param,
            "context_length_exceeded",
        )


@lru_cache(maxsize=1)
def _longest(tokenizer: Tokenizer) -> int:
    """Characters of a token, at most; a spelling by bytes is longer than its text, never shorter."""
    return max(map(len, tokenizer.vocabulary()), default=1)
