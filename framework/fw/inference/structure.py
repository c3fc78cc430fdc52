"""Answers of a form that is asked for: JSON by a schema, a regular expression, or a grammar; by the library llguidance
(https://github.com/guidance-ai/llguidance), which says at every token what may come next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from fw.errors import UserError
from fw.inference.options import Sampling, form_text
from fw.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MISSING = "structured output (json_schema, regex, grammar) needs llguidance: pip install 'fw[structured]'"
_T = TypeVar("_T")
_STACK_BYTES = 256 << 20
"""llguidance goes through what it is given by recursion: the deepest texts of the length that options allow take less than half of it."""
_FUEL = 50_000
"""For expressions before the first token, some of which take memory by its square: a list of 2,000 values passes, 300 MB are the most."""
_starting = threading.Lock()
_GRAMMARS = {"json_schema": "grammar_from_json_schema", "regex": "grammar_from_regex", "grammar": "grammar_from_lark"}


class Form:
    """Where an answer is in the form that it is to have."""

    def __init__(self, matcher: LLMatcher, first: bytes | None = None) -> None:
        self._matcher, self._first = matcher, first

    def copy(self) -> Form:
        """From here on by itself."""
        return Form(self._matcher.deep_copy(), self._first)

    @property
    def error(self) -> str | None:
        """Why it cannot be followed any more; nothing is allowed then."""
        return f"the form that was asked for cannot be followed: {_first(self._matcher.get_error())}" if self._matcher.is_error() else None

    def look_ahead(self) -> None:
        """At what may come first, which takes longest, for this one and its copies."""
        self._first = bytes(self._matcher.compute_bitmask())

    def allowed(self, size: int) -> Tensor:
        """bool ``[size]``: which tokens may come next; the model's end where the answer is whole."""
        mask = bytearray(self._matcher.compute_bitmask() if self._first is None else self._first)
        if self._matcher.is_error():  # the mask has the end of a text then
            return torch.zeros(size, dtype=torch.bool)
        bits = torch.frombuffer(mask, dtype=torch.uint8)
        bits_V = (bits[:, None] >> torch.arange(8, dtype=torch.uint8)).bitwise_and(1).bool().flatten()[:size]
        return torch.nn.functional.pad(bits_V, (0, size - len(bits_V)))

    def take(self, token: int) -> None:
        """One that came next, and was allowed.

        Raises:
            UserError: the form turned out to be more than can be followed.
        """
        self._first = None
        if not self._matcher.consume_token(token):
            raise UserError(str(self.error))

    @property
    def ended(self) -> bool:
        """Whether nothing may come any more."""
        return bool(self._matcher.is_stopped())


class Structure:
    """Makes forms for a model's tokens. The first one takes a moment: it sorts the vocabulary."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, ends
        self._known: LLTokenizer | None = None

    def form(self, sampling: Sampling) -> Form | None:
        """As a request wants its answers; None where it does not care. Other threads may work meanwhile.

        Raises:
            UserError: the library is not there, the form is none or too much, or the tokenizer is one that it does not know.
        """
        if (wanted := sampling.form) is None:
            return None
        name, text = wanted[0], form_text(*wanted)
        return _with_stack(lambda: self._made(name, text))

    def _made(self, name: str, text: str) -> Form:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            raise UserError(MISSING) from None
        try:
            grammar = str(getattr(LLMatcher, _GRAMMARS[name])(text))
        except ValueError as error:
            raise UserError(f"{name}: {_first(error)}") from None
        limits = LLParserLimits(initial_lexer_fuel=_FUEL, verbose_errors=False)
        matcher = LLMatcher(self._tokens(), grammar, log_level=0, limits=limits)
        form = Form(matcher)
        if not matcher.is_error():
            form.look_ahead()
        if matcher.is_error():
            raise UserError(f"{name}: {_first(matcher.get_error())}")
        return form

    def _tokens(self) -> LLTokenizer:
        if self._known is None:
            from llguidance import LLTokenizer

            if not self._ends:
                raise UserError("structured output needs a token that ends a text, and this model has none")
            size = max(self._vocab_size, self._tokenizer.vocab_size)
            try:
                self._known = LLTokenizer(self._tokenizer.backend_json, n_vocab=size, eos_token=sorted(self._ends))
            except ValueError as error:
                raise UserError(f"structured output does not know this kind of tokenizer: {_first(error)}") from None
        return self._known


def _with_stack(what: Callable[[], _T]) -> _T:
    """What it gives, in a thread that may recurse deeply."""
    found: list[_T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(what())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="form")
    with _starting:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


def _first(error: object) -> str:
    return next(iter(str(error).strip().splitlines()), "it is refused")
