"""Records as ids, and which of these are to be learnt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from fw.api import Tokenizer, UserError

Learnt = Literal["assistant", "last", "all"]
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant"}
"""ShareGPT's names of roles."""
_MARK_IT = "put {% generation %} and {% endgeneration %} around that in the template"


class Encoded(NamedTuple):
    """``learnt``: 1 for each id that is to be learnt, else 0."""

    ids: list[int]
    learnt: list[int]


def text(tokenizer: Tokenizer, content: str) -> Encoded:
    """All of a text, and its end."""
    ids = [*tokenizer.encode(content, split_special_tokens=True), *_end(tokenizer)]
    return Encoded(ids, [1] * len(ids))


def pair(tokenizer: Tokenizer, prompt: str, completion: str, learns_prompt: bool) -> Encoded:
    """What follows a prompt, and its end. Both are tokenized by themselves, as they are when a model is asked."""
    before = tokenizer.encode(prompt, split_special_tokens=True)
    after = [*tokenizer.encode(completion, add_special_tokens=False, split_special_tokens=True), *_end(tokenizer)]
    return Encoded([*before, *after], [int(learns_prompt)] * len(before) + [1] * len(after))


def _end(tokenizer: Tokenizer) -> list[int]:
    return [] if tokenizer.eos_id is None else [tokenizer.eos_id]


def messages_of(value: Any) -> list[dict[str, Any]]:
    """A conversation in the form that templates take; ShareGPT's is brought into it.

    Raises:
        UserError: it is none.
    """
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise UserError("it has no list of messages")
    found = []
    for number, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise UserError(f"message {number} is a {type(message).__name__}, not an object")
        if "from" in message and "value" in message and "role" not in message:
            role = str(message["from"])
            message = {"role": _ROLES.get(role, role), "content": message["value"]}
        if "role" not in message:
            raise UserError(f"message {number} has no role")
        found.append(dict(message))
    return found


def tools_of(value: Any) -> list[Mapping[str, Any]] | None:
    """The tools of a conversation, which many data sets keep as JSON in a text; None where there are none.

    Raises:
        UserError: they are no list of schemas.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value or "null")
        except (ValueError, RecursionError) as error:
            raise UserError(f"its tools are a text that is no JSON ({error})") from None
    if not value:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(tool, Mapping) for tool in value):
        raise UserError("its tools are no list of JSON schemas")
    return list(value)


def conversation(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    template: str | None,
    learnt: Learnt,
) -> Encoded:
    """A conversation as its template writes it, learnt where the assistant speaks: what the template marks by ``{% generation %}``; where
    it marks nothing, what is written between the text that asks for an answer and the end of that answer's message.

    Raises:
        UserError: the template does not accept it; it marks nothing and writes a beginning otherwise than the whole.
    """
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError("no message of it is an assistant's, so there is nothing to learn")
    if learnt == "all":
        ids = tokenizer.apply_chat_template(messages, tools=tools, chat_template=template)
        return Encoded(ids, [1] * len(ids))
    if tokenizer.marks_assistant(template, with_tools=tools is not None):
        chat = tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, return_assistant_mask=True)
    else:
        spans = _spans(tokenizer, messages, tools, template)
        chat = tokenizer.encode_spans(tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False), spans)
    mask = chat.assistant_mask
    if learnt == "last":
        before = next((place for place in range(len(mask) - 1, -1, -1) if mask[place]), -1)
        first = before
        while first > 0 and mask[first - 1]:
            first -= 1
        mask = [int(first <= place <= before) for place in range(len(mask))]
    return Encoded(chat.ids, mask)


def _spans(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, template: str | None
) -> list[tuple[int, int]]:
    """Where the assistant's messages stand in the text, the token that ends each included."""

    def written(some: Sequence[Mapping[str, Any]], asks: bool) -> str:
        return tokenizer.apply_chat_template(some, tools=tools, chat_template=template, add_generation_prompt=asks, tokenize=False)

    def header(first: str) -> str:
        """What stands before an answer that nothing asks for, in its text ``first``: all up to the words that ask for one elsewhere."""
        question = [{"role": "user", "content": "?"}]
        before, asked = written(question, asks=False), written(question, asks=True)
        mark = asked.removeprefix(before) if asked.startswith(before) else ""
        if not mark or mark not in first:
            raise UserError(
                "the assistant begins, and the chat template writes no words before it that ask for an answer, so that nobody can tell"
                f" where it does; {_MARK_IT}"
            )
        return first[: first.index(mark) + len(mark)]

    whole = written(messages, asks=False)
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        upto = written(messages[: number + 1], asks=False)
        before = written(messages[:number], asks=True) if number else header(upto)
        if not whole.startswith(before) or not whole.startswith(upto):
            raise UserError(
                f"the chat template writes the beginning of a conversation otherwise than the whole (at message {number}), so that nobody"
                f" can tell what the assistant says; {_MARK_IT}"
            )
        spans.append((len(before), max(len(before), len(upto.rstrip("\n")))))
    return spans
