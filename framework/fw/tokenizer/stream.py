"""Text of ids that come one after another.

A decoder of the ``tokenizers`` library is a chain of steps over all tokens of a text. Each step is written here so that it takes them as
they come and keeps only what may still change, so the cost of a token does not grow with the text before it.
"""

from __future__ import annotations

import codecs
import copy
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from fw.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from fw.tokenizer.tokenizer import Tokenizer

_HELD_BYTES = 32
_INVALID = "\ufffd"


class TextStream:
    """Gives the text of ids as soon as it can no longer change, never half a character.

    All pieces together are ``tokenizer.decode(ids)``, and what was given so far is always the beginning of it. The one exception is a
    run of byte tokens (``<0xE2>``) that is longer than 32 bytes and not UTF-8: ``decode`` then replaces also its valid characters, of
    which some may have been given already, since a run is not held back for longer.

    Args:
        tokenizer: whose ids.
        skip_special_tokens: leave special tokens out.
        after: ids that are before these in one text. What is done to its beginning alone, as a space that is taken away, is not done to
            these then, unless all before them are left out.

    Raises:
        UserError: the tokenizer's decoder has a step that cannot be done piece by piece.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = False, after: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._steps = _steps(tokenizer.decoder_state)
        if any(token not in self._skipped for token in after):
            for step in self._steps:
                step.go_on()

    def push(self, ids: int | Sequence[int] | Tensor) -> str:
        """Text that one or more further ids complete; often empty."""
        tokens = []
        for value in [ids] if isinstance(ids, int) else as_list(ids):
            token = None if value in self._skipped else self._tokenizer.id_to_token(value)
            if token is not None:
                tokens.append(token)
        for step in self._steps:
            tokens = [piece for token in tokens for piece in step.push(token)]
        return "".join(tokens)

    def ahead(self) -> str:
        """Whole characters that are held back: how the text goes on if it ends here."""
        for place, step in enumerate(self._steps):
            if isinstance(step, _ByteFallback) and (text := step.whole()):
                tokens = [text]
                for later in copy.deepcopy(self._steps[place + 1 :]):
                    tokens = [piece for token in tokens for piece in later.push(token)]
                return "".join(tokens)
        return ""

    def finish(self) -> str:
        """The rest; the stream is then as new."""
        tokens: list[str] = []
        for step in self._steps:
            tokens = [piece for token in tokens for piece in step.push(token)] + step.finish()
        return "".join(tokens)


def bytes_of(tokenizer: Tokenizer, token: int) -> bytes:
    """What a token stands for inside a text; of one that is part of a character, its part. Empty where there is no such token.

    Raises:
        UserError: as :class:`TextStream`.
    """
    if (spelled := tokenizer.id_to_token(token)) is None:
        return b""
    for step in _shared_steps(tokenizer.decoder_state):
        if isinstance(step, _Bytes):
            return step.bytes_of(spelled)
        if isinstance(step, _ByteFallback) and (byte := step.byte_of(spelled)) is not None:
            return byte
    stream = TextStream(tokenizer)
    stream.push(token)  # what is done to the beginning of a text is done to this one
    return stream.push(token).encode()


def as_list(ids: Sequence[int] | Tensor) -> list[int]:
    """Ids as the library takes them; of tensors and arrays, those of one dimension."""
    return ids.tolist() if hasattr(ids, "tolist") else list(ids)


class _Step(ABC):
    """One step of a decoder."""

    @abstractmethod
    def push(self, token: str) -> list[str]:
        """What is certain after a further token."""

    def finish(self) -> list[str]:
        """What was held back; then begin anew."""
        return []

    def go_on(self) -> None:
        """What comes next is no beginning; for most that is the same."""
        return


class _Bytes(_Step):
    """A character per byte, as byte-level BPE writes them; a token with another character stands for its own UTF-8."""

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in set(printable)]
        self._byte = {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
        self._decode = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: str) -> list[str]:
        return [self._decode.decode(self.bytes_of(token))]

    def bytes_of(self, token: str) -> bytes:
        """That it is written for."""
        try:
            return bytes([self._byte[c] for c in token])
        except KeyError:
            return token.encode()

    def finish(self) -> list[str]:
        text = self._decode.decode(b"", final=True)
        self._decode.reset()
        return [text]


class _ByteFallback(_Step):
    """Tokens ``<0xE2>`` are bytes. A run of them that is not UTF-8 is one replacement character per byte, its valid ones included."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._run = b""
        self._length = 0
        self._broken = False

    def push(self, token: str) -> list[str]:
        byte = self.byte_of(token)
        if byte is None:
            return [*self.finish(), token]
        self._run += byte
        self._length += 1
        whole = _whole_characters(self._run)
        self._broken |= whole is None
        if self._broken:
            lost, self._run = len(self._run), b""
            return [_INVALID] * lost
        if self._length <= _HELD_BYTES:
            return []
        text, self._run = self._run[:whole].decode(), self._run[whole:]
        return [text] if text else []

    def whole(self) -> str:
        """Characters that are held back."""
        return "" if self._broken else self._run[: _whole_characters(self._run) or 0].decode()

    @staticmethod
    def byte_of(token: str) -> bytes | None:
        """None for a token that is text."""
        byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)
        return None if byte is None else bytes([int(byte[1], 16)])

    def finish(self) -> list[str]:
        run = self._run
        self._begin()
        if _whole_characters(run) == len(run):
            return [run.decode()] if run else []
        return [_INVALID] * len(run)


def _whole_characters(data: bytes) -> int | None:
    """How many bytes at the beginning are whole characters; None where what follows them can never be one."""
    try:
        return codecs.utf_8_decode(data, "strict", False)[1]
    except UnicodeDecodeError:
        return None


class _Replace(_Step):
    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new

    def push(self, token: str) -> list[str]:
        return [token.replace(self._old, self._new)]


class _Metaspace(_Step):
    """Spaces for a mark, and none for the marks of the first token where one was put before the text."""

    def __init__(self, mark: str, prepended: bool) -> None:
        self._mark, self._prepended = mark, prepended
        self._first = True

    def push(self, token: str) -> list[str]:
        space = "" if self._first and self._prepended else " "
        self._first = False
        return [token.replace(self._mark, space)]

    def finish(self) -> list[str]:
        self._first = True
        return []

    def go_on(self) -> None:
        self._first = False


class _StripTokens(_Step):
    """Up to a number of characters off both ends of each token."""

    def __init__(self, character: str, start: int, stop: int) -> None:
        self._character, self._start, self._stop = character, start, stop

    def push(self, token: str) -> list[str]:
        begin, end = 0, len(token)
        while begin < min(self._start, len(token)) and token[begin] == self._character:
            begin += 1
        while len(token) - end < self._stop and end > 0 and token[end - 1] == self._character:
            end -= 1
        return [token[begin:end]]


class _StripText(_Step):
    """Up to a number of characters off the beginning of the text."""

    def __init__(self, character: str, count: int) -> None:
        self._character, self._count = character, count
        self._left = count

    def push(self, token: str) -> list[str]:
        while self._left and token:
            if token[0] != self._character:
                self._left = 0
            else:
                token = token[1:]
                self._left -= 1
        return [token]

    def finish(self) -> list[str]:
        self._left = self._count
        return []

    def go_on(self) -> None:
        self._left = 0


class _Spaced(_Step):
    """No decoder at all: tokens with a space between."""

    def __init__(self) -> None:
        self._first = True

    def push(self, token: str) -> list[str]:
        text = token if self._first else f" {token}"
        self._first = False
        return [text]

    def finish(self) -> list[str]:
        self._first = True
        return []

    def go_on(self) -> None:
        self._first = False


@lru_cache(maxsize=4)
def _shared_steps(state: str | None) -> list[_Step]:
    """Likewise, for questions that depend on nothing but the token."""
    return _steps(state)


def _steps(state: str | None) -> list[_Step]:
    """The steps of a decoder, given as the library writes it in ``tokenizer.json``."""
    if state is None:
        return [_Spaced()]
    decoder = json.loads(state)
    steps: list[_Step] = []
    fused = False  # from here on there is one text, no longer a list of tokens
    for part in decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]:
        kind = part["type"]
        if kind == "ByteLevel" and not fused:
            steps.append(_Bytes())
            fused = True
        elif kind == "ByteFallback" and not fused:
            steps.append(_ByteFallback())
        elif kind == "Replace" and (old := part["pattern"].get("String")) and (not fused or len(old) == 1):
            steps.append(_Replace(old, part["content"]))
        elif kind == "Metaspace" and not fused:
            steps.append(_Metaspace(part["replacement"], part.get("prepend_scheme", "always") != "never"))
        elif kind == "Strip" and not fused:
            steps.append(_StripTokens(part["content"], part["start"], part["stop"]))
        elif kind == "Strip" and not part["stop"]:
            steps.append(_StripText(part["content"], part["start"]))
        elif kind == "Fuse":
            fused = True
        else:
            raise UserError(f"tokenizer.json: text cannot be decoded piece by piece with {_described(part)}; decode it as a whole")
    return steps


def _described(part: dict[str, Any]) -> str:
    return f"the decoder {part['type']}" + (f" of {part['pattern']}" if "pattern" in part else "")
