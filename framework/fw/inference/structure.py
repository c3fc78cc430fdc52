"""Answers of a form that is asked for: JSON by a schema, a regular expression, or a grammar; by the library llguidance
(https://github.com/guidance-ai/llguidance), which says at every token what may come next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fw.errors import UserError
from fw.inference.options import Sampling
from fw.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MISSING = "structured output (json_schema, regex, grammar) needs llguidance: pip install 'fw[structured]'"


_GRAMMARS = {"json_schema": "grammar_from_json_schema", "regex": "grammar_from_regex", "grammar": "grammar_from_lark"}


class Form:
    """Where an answer is in the form that it is to have."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def copy(self) -> Form:
        """From here on by itself."""
        return Form(self._matcher.deep_copy())

    def allowed(self, size: int) -> Tensor:
        """bool ``[size]``: which tokens may come next; the model's end where the answer is whole."""
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        bits_V = (bits[:, None] >> torch.arange(8, dtype=torch.uint8)).bitwise_and(1).bool().flatten()[:size]
        return torch.nn.functional.pad(bits_V, (0, size - len(bits_V)))

    def take(self, token: int) -> None:
        """One that came next, and was allowed.

        Raises:
            UserError: the form turned out to be more than can be followed.
        """
        if not self._matcher.consume_token(token):
            raise UserError(f"the form that was asked for cannot be followed: {self._matcher.get_error()}")

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
        """As a request wants its answers; None where it does not care.

        Raises:
            UserError: the library is not there, the form is none, or the tokenizer is one that it does not know.
        """
        if sampling.form is None:
            return None
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise UserError(MISSING) from None
        name, wanted = sampling.form
        try:
            grammar = str(getattr(LLMatcher, _GRAMMARS[name])(wanted))
        except ValueError as error:
            raise UserError(f"{name}: {_first(error)}") from None
        known = self._tokens()
        wrong, why = LLMatcher.validate_grammar_with_warnings(grammar, known)
        if wrong:
            raise UserError(f"{name}: {_first(why[0])}")
        matcher = LLMatcher(known, grammar, log_level=0)
        if matcher.is_error():
            raise UserError(f"{name}: {_first(matcher.get_error())}")
        return Form(matcher)

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


def _first(error: object) -> str:
    return next(iter(str(error).strip().splitlines()), "it is refused")
