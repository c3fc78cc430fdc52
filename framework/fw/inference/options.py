"""What a request may ask for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fw.errors import UserError

_GREEDY_BELOW = 1e-5
"""Of temperatures, as vLLM has it: what is drawn there is the likeliest token anyway."""
_MAY_BE_NONE = ("max_tokens", "seed", "best_of", "logprobs", "prompt_logprobs")
_MOST = 3.4e38
"""Of numbers that logits meet."""
_FORM_CHARACTERS: Mapping[str, int] = {"json_schema": 128 << 10, "regex": 32 << 10, "grammar": 32 << 10}
"""Most of a form's text: what llguidance takes for it in memory, time and stack grows with it, of some as its square."""
_CALLED: Mapping[type, str] = {int: "whole number", float: "number", bool: "true or false"}


@dataclass(frozen=True)
class Sampling:
    """How a request wants its tokens chosen, and when it ends.

    Attributes:
        max_tokens: most tokens of an answer; None for what the context leaves, 0 for none, where only the prompt's log-probabilities are
            wanted.
        min_tokens: before which nothing ends it.
        temperature: that logits are divided by; 0, and all below 1e-5, always takes the likeliest token.
        top_k: only that many likeliest tokens; 0 for all, or -1, which is vLLM's word for it.
        top_p: only the likeliest tokens that together have this probability (Holtzman et al. 2019, https://arxiv.org/abs/1904.09751).
        min_p: only tokens with this share of the likeliest one's probability (Nguyen et al. 2024, https://arxiv.org/abs/2407.01082).
        repetition_penalty: logits of tokens of prompt and answer are divided by it where above 0, else multiplied (Keskar et al. 2019,
            https://arxiv.org/abs/1909.05858).
        presence_penalty: taken from logits of tokens the answer has already.
        frequency_penalty: the same, once for each time.
        logit_bias: added to logits, by token id.
        seed: of the choice; with it an answer is the same each time. None, or -1, for another one each time.
        n: answers to the prompt.
        best_of: of so many the n likeliest are given, by their mean log-probability; None for n.
        stop: texts that end an answer; it has nothing of them.
        stop_token_ids: ids that end an answer, as the model's own end does.
        ignore_eos: go on at the model's own end.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: log-probabilities of the tokens, and of so many likeliest in their place; None for none. They are the model's own, before
            temperature and all else.
        prompt_logprobs: the same of the prompt's tokens.
        prompt_logprobs_from: the first of these, counted from 0; what is before it need not be computed again where others have had it.
        json_schema: the answer is JSON by this schema (an object, or its text); ``{}`` for any JSON.
        regex: the answer is what this regular expression matches as a whole, in the syntax of Rust's crate regex.
        grammar: the answer is of this grammar, in llguidance's dialect of Lark.
    """

    max_tokens: int | None = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = 0
    prompt_logprobs: int | None = None
    prompt_logprobs_from: int = 1
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        self._take_lists()
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        for name, kind, least, most in (
            ("max_tokens", int, 0, math.inf),
            ("min_tokens", int, 0, math.inf),
            ("temperature", float, 0, math.inf),
            ("top_k", int, 0, math.inf),
            ("top_p", float, 0, 1),
            ("min_p", float, 0, 1),
            ("repetition_penalty", float, 0, math.inf),
            ("presence_penalty", float, -2, 2),
            ("frequency_penalty", float, -2, 2),
            ("seed", int, -math.inf, math.inf),
            ("n", int, 1, math.inf),
            ("best_of", int, self.n, math.inf),
            ("ignore_eos", bool, 0, 1),
            ("skip_special_tokens", bool, 0, 1),
            ("logprobs", int, 0, math.inf),
            ("prompt_logprobs", int, 0, math.inf),
            ("prompt_logprobs_from", int, 1, math.inf),
        ):
            value = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            if not (isinstance(value, int | float) if kind is float else isinstance(value, kind)) or isinstance(value, bool) != (
                kind is bool
            ):
                raise UserError(f"{name}: {value!r} is no {_CALLED[kind]}")
            if not least <= value <= most:
                bound = f"at least {least}" if most == math.inf else f"between {least} and {most}"
                raise UserError(f"{name}: {value} is not {bound}")
            if kind is float and value > _MOST:
                raise UserError(f"{name}: {value} is more than fp32 holds, which logits are in; the most is {_MOST:g}")
        if self.top_p == 0 or self.repetition_penalty == 0:
            raise UserError("top_p and repetition_penalty must be above 0; 1 is for neither")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UserError(f"min_tokens: {self.min_tokens} is more than max_tokens {self.max_tokens}")
        if not all(self.stop):
            raise UserError("stop: an empty text ends every answer before it begins; leave it out")
        if (form := self.form) is not None:
            _check_form(*form)

    def _take_lists(self) -> None:
        """In the forms in which JSON has them, too: one text for a list of it, numbers as keys in quotation marks."""
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence) or not all(isinstance(text, str) for text in stop):
            raise UserError(f"stop: {self.stop!r} is neither a text nor a list of texts")
        ids = self.stop_token_ids
        if not isinstance(ids, Sequence) or not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise UserError(f"stop_token_ids: {ids!r} is no list of token ids")
        try:
            bias = {int(token): float(added) for token, added in self.logit_bias.items()}
        except (AttributeError, TypeError, ValueError, OverflowError):
            raise UserError(f"logit_bias: {self.logit_bias!r} is no object of token ids and numbers") from None
        if strange := [token for token, added in bias.items() if not abs(added) <= _MOST]:
            raise UserError(
                f"logit_bias: {bias[strange[0]]} of token {strange[0]} is no number that fp32 holds; 100 makes it certain, and -100 bans it"
            )
        for name, value in (("stop", tuple(stop)), ("stop_token_ids", tuple(ids)), ("logit_bias", bias)):
            object.__setattr__(self, name, value)

    @property
    def drawn(self) -> int:
        """Answers that are generated."""
        return self.best_of or self.n

    @property
    def form(self) -> tuple[str, Any] | None:
        """Of the answer: ``json_schema``, ``regex`` or ``grammar``, and what was given."""
        return parsed_form(self.json_schema, self.regex, self.grammar)

    @property
    def greedy(self) -> bool:
        """Whether nothing is left to chance."""
        return self.temperature < _GREEDY_BELOW


def parsed_form(json_schema: Any, regex: Any, grammar: Any) -> tuple[str, Any] | None:
    """The one that is asked for.

    Raises:
        UserError: several, or one that is of no such kind.
    """
    given = {name: value for name, value in (("json_schema", json_schema), ("regex", regex), ("grammar", grammar)) if value is not None}
    if not given:
        return None
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)}: an answer has one form; give one of them")
    ((name, value),) = given.items()
    if name == "json_schema":
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise UserError(f"json_schema: not JSON: {error}") from None
        if not isinstance(value, dict | bool):
            raise UserError(f"json_schema: {value!r} is no schema")
    elif not isinstance(value, str):
        raise UserError(f"{name}: {value!r} is no text")
    return name, value


def form_text(name: str, value: Any) -> str:
    """Of a form as :func:`parsed_form` has it.

    Raises:
        UserError: it is no JSON, or too deep for it.
    """
    if name != "json_schema":
        return str(value)
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise UserError("json_schema: it is nested too deeply; name parts of it in $defs") from None
    except (TypeError, ValueError) as error:
        raise UserError(f"json_schema: not JSON: {error}") from None


def _check_form(name: str, value: Any) -> None:
    length, most = len(form_text(name, value)), _FORM_CHARACTERS[name]
    if length > most:
        raise UserError(f"{name}: {length:,} characters are more than the {most:,} that one may have; ask for a simpler one")
