"""From what somebody asks to what an engine takes. Needs nothing heavy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fw.errors import UserError, did_you_mean
from fw.inference.options import Sampling
from fw.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or a conversation as messages with ``role`` and ``content``."""


_FORMS = ("json_schema", "regex", "grammar")


class Model(Protocol):
    """What requests are asked of."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def defaults(self) -> Sampling: ...
    @property
    def adapters(self) -> Sequence[str]: ...


def sampling(defaults: Sampling, settings: Mapping[str, Any]) -> Sampling:
    """The defaults, but for the settings.

    Raises:
        UserError: one that is not known, or a wrong value.
    """
    names = [field.name for field in dataclasses.fields(Sampling)]
    for name in settings:
        if name not in names:
            raise UserError(f"a request has no '{name}'{did_you_mean(name, names)} (it has: {', '.join(names)})")
    return dataclasses.replace(defaults, **settings)


def over(otherwise: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a request, and those of all requests where it does not say. An answer has one form."""
    has_form = any(own.get(name) is not None for name in _FORMS)
    return {**{name: value for name, value in otherwise.items() if not (has_form and name in _FORMS)}, **own}


def encode(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Token ids of a prompt; of a conversation, up to where the answer begins.

    Raises:
        UserError: it is none of these, or the tokenizer has no chat template.
    """
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if isinstance(prompt, Sequence) and all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
        return list(prompt)  # type: ignore[arg-type]
    if isinstance(prompt, Sequence) and all(isinstance(item, Mapping) for item in prompt):
        return tokenizer.apply_chat_template(prompt, add_generation_prompt=True)  # type: ignore[arg-type]
    raise UserError("a prompt is a text, a list of token ids, or a list of messages with role and content")
