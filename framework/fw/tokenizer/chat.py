"""Chat templates: Jinja programs that write a conversation as one text, in the dialect of transformers.

A template comes with a model, so it is a stranger's program: it runs in Jinja's sandbox and sees nothing but JSON data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import date, datetime, time
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from fw.errors import UserError, did_you_mean
from fw.tokenizer.files import CONFIG, TEMPLATE, TEMPLATES, text_of

Message = Mapping[str, Any]
"""``role``, ``content`` and what else the template reads."""

# Around generated text while it is looked for. Unicode has set these aside for use inside a program; no text has them.
_BEGIN, _END = "\ufdd0", "\ufdd1"
# Put at the end of a message to find that end in the text; the space shows whether the template strips messages.
_OPEN = "FW_CONTINUED_HERE "
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class RenderedChat:
    """Text of a conversation, and where in it (first character, one past the last) the assistant's words stand, in order."""

    text: str
    generated: list[tuple[int, int]]


class ChatTemplates:
    """The templates of a tokenizer: files of their own go before those in ``tokenizer_config.json``."""

    def __init__(self, files: Mapping[str, bytes], config: Mapping[str, Any], place: str) -> None:
        self._place = place
        self._texts: dict[str, str] = {}
        self._places: dict[str, str] = {}
        for file, content in files.items():
            if file == TEMPLATE or file.startswith(f"{TEMPLATES}/"):
                name = "default" if file == TEMPLATE else file.removeprefix(f"{TEMPLATES}/").removesuffix(".jinja")
                self._places[name] = f"{place}/{file}"
                self._texts[name] = text_of(content, self._places[name]).replace("\r\n", "\n").replace("\r", "\n")
        if not self._texts:
            self._from_config(config.get("chat_template"), f"{place}/{CONFIG}: chat_template")

    def _from_config(self, value: Any, place: str) -> None:
        if isinstance(value, list) and all(isinstance(item, dict) and {"name", "template"} <= item.keys() for item in value):
            value = {item["name"]: item["template"] for item in value}
        elif isinstance(value, str):
            value = {"default": value}
        elif value is None:
            value = {}
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            raise UserError(f"{place}: it is neither a template nor a list of objects with name and template; write one of these")
        self._texts = value
        self._places = {name: f"{place} '{name}'" if len(value) > 1 else place for name in value}

    def render(
        self,
        messages: Sequence[Message],
        chosen: str | None,
        arguments: Mapping[str, Any],
        variables: Mapping[str, Any],
        continued: bool | str,
        mark: bool,
    ) -> RenderedChat:
        """Write a conversation; see :meth:`fw.tokenizer.Tokenizer.apply_chat_template`.

        Raises:
            UserError: there is no such template, it is wrong, or it does not accept the messages.
        """
        text, place = self._choose(chosen, arguments["tools"] is not None)
        if continued and (mark or arguments["add_generation_prompt"]):
            other = "an assistant mask" if mark else "add_generation_prompt"
            raise UserError(f"{place}: continue_final_message and {other} exclude each other; leave out one of them")
        if not messages:
            raise UserError(f"{place}: the conversation is empty; give at least one message")
        chat = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
        final = _leave_open(chat, "content" if continued is True else continued, text, place) if continued else None
        template, marks = _compiled(text, place)
        if mark and not marks:
            raise UserError(
                f"{place}: it does not mark what the assistant writes, so there is no assistant mask;"
                " put {% generation %} and {% endgeneration %} around that in the template"
            )
        given = {**arguments, **variables}
        everything: dict[str, Any] = {"messages": chat, **{name: _plain(value, name) for name, value in given.items()}}
        with _rendering(marking=False):
            written = _run(template, everything, place)
            if final is not None:
                return RenderedChat(_cut_open(written, final, place), [])
            if not mark:
                return RenderedChat(written, [])
            with _rendering(marking=True) as rendering:
                marked = _run(template, everything, place)
        found = _spans(marked)
        if found is None or marked.count(_BEGIN) != rendering.blocks or marked.replace(_BEGIN, "").replace(_END, "") != written:
            raise UserError(
                f"{place}: it changes or drops what stands in {{% generation %}}, so there is no assistant mask;"
                " let the template write that as it is"
            )
        return RenderedChat(written, found)

    @property
    def text(self) -> str | None:
        """Of the one for tools, or the default one."""
        return self._texts.get("tool_use", self._texts.get("default"))

    def marks(self, chosen: str | None, with_tools: bool) -> bool:
        """Whether a template says what the assistant writes; see :meth:`fw.tokenizer.Tokenizer.marks_assistant`."""
        return _compiled(*self._choose(chosen, with_tools))[1]

    def _choose(self, chosen: str | None, with_tools: bool) -> tuple[str, str]:
        there = ", ".join(self._texts)
        if chosen is None:
            name = "tool_use" if with_tools and "tool_use" in self._texts else "default"
            if name in self._texts:
                return self._texts[name], self._places[name]
            if there:
                raise UserError(f"{self._place}: none of its chat templates is the default; name one of {there} as chat_template")
            raise UserError(f"{self._place}: it has no chat template; give one as chat_template, or put it there as {TEMPLATE}")
        if chosen in self._texts:
            return self._texts[chosen], self._places[chosen]
        if "{{" not in chosen and "{%" not in chosen:
            near = did_you_mean(chosen, self._texts)
            raise UserError(
                f"{self._place}: there is no chat template '{chosen}'{near} (there are: {there or 'none'}); "
                f"give a template's own text, or put its file there as {TEMPLATE}"
            )
        return chosen, "chat_template"


def _message(message: Message, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UserError(f"{place}: it is a {type(message).__name__}, not an object with role and content")
    # Interfaces of servers write None where they mean nothing, and few templates expect it.
    plain = {key: _plain(value, f"{place}.{key}") for key, value in message.items() if value is not None}
    thought = next((plain[name] for name in _THOUGHTS if name in plain), None)
    if thought is None:
        return plain
    return {"thinking": thought, **plain, "reasoning_content": thought}  # templates differ in the name they read


def _plain(value: Any, place: str) -> Any:
    """A copy made of JSON's types and no subclass of them, whose methods a template could call."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, Mapping):
        return {_plain(key, place): _plain(item, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{place}[{i}]") for i, item in enumerate(value)]
    raise UserError(f"{place}: a chat template takes JSON data, not a {type(value).__name__}; write it as text, number, list or object")


def _leave_open(chat: list[dict[str, Any]], field: str, template: str, place: str) -> str:
    """Mark the end of the last message; gives its text."""
    last = chat[-1]
    value = last.get(field)
    fields = [name for name in _THOUGHTS if last.get(name) == value] if field in _THOUGHTS else [field]
    if value is None:
        raise UserError(f"messages[{len(chat) - 1}]: it has no '{field}' to be continued; end with a message that has")
    if not any(name in template for name in fields):
        raise UserError(f"{place}: it does not read '{field}', so that cannot be continued; name another field")
    if isinstance(value, list):
        block = next((block for block in reversed(value) if isinstance(block, dict) and isinstance(block.get("text"), str)), None)
        if block is None:
            raise UserError(f"messages[{len(chat) - 1}].{field}: there is no text to be continued; end with one")
        text: str = block["text"]
        block["text"] = text + _OPEN
        return text
    if not isinstance(value, str):
        raise UserError(f"messages[{len(chat) - 1}].{field}: a {type(value).__name__} cannot be continued; give text")
    for name in fields:
        last[name] = value + _OPEN
    return value


def _cut_open(written: str, final: str, place: str) -> str:
    """The text up to the end of the last message."""
    at = written.rfind(_OPEN.strip())
    if at < 0 or final.strip() not in written:
        raise UserError(
            f"{place}: it does not write the last message as it is, so that cannot be continued; leave out continue_final_message"
        )
    kept = written[:at]
    return kept if written.startswith(_OPEN, at) else kept.rstrip()  # without the space, it would have stripped the message too


def _spans(marked: str) -> list[tuple[int, int]] | None:
    """Where text is generated, in characters of the text without marks; None where the marks do not match."""
    spans: list[tuple[int, int]] = []
    at, depth, start = 0, 0, 0
    for piece in re.split(f"([{_BEGIN}{_END}])", marked):
        if piece == _BEGIN:
            start = at if depth == 0 else start
            depth += 1
        elif piece == _END:
            depth -= 1
            if depth == 0 and at > start:
                spans.append((start, at))
        else:
            at += len(piece)
        if depth < 0:
            return None
    return spans if depth == 0 else None


class _Rendering:
    """One rendering in progress."""

    def __init__(self, now: datetime, marking: bool) -> None:
        self.now, self.marking = now, marking
        self.blocks = 0


# Compiled templates are shared by threads; what belongs to one rendering is not kept in them.
_rendered: ContextVar[_Rendering] = ContextVar("rendering")


@contextmanager
def on_day(day: date | None) -> Iterator[None]:
    """Within it templates write this day where they write today's; None for one moment in place of several."""
    now = datetime.now() if day is None else datetime.combine(day, time())
    token = _rendered.set(_Rendering(now, False))
    try:
        yield
    finally:
        _rendered.reset(token)


@contextmanager
def _rendering(marking: bool) -> Iterator[_Rendering]:
    before = _rendered.get(None)
    rendering = _Rendering(before.now if before else datetime.now(), marking)
    token = _rendered.set(rendering)
    try:
        yield rendering
    finally:
        _rendered.reset(token)


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}``: text of the assistant."""

    tags = {"generation"}  # noqa: RUF012
    used = False

    def parse(self, parser: Parser) -> nodes.Node:
        """Called by Jinja at the tag."""
        self.used = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Callable[[], str]) -> str:
        text = caller()
        rendering = _rendered.get()
        if not rendering.marking:
            return text
        rendering.blocks += 1
        return f"{_BEGIN}{text}{_END}"


class _SafeNamespace(Namespace):
    """Jinja's, without names that Python gives a meaning."""

    def __init__(self, /, *args: Any, **values: Any) -> None:
        values = dict(*args, **values)
        for name in values:
            _check_name(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"the name {name!r} in a namespace begins with an underscore")


class _SafeDict:
    """``dict`` as a function, not as the class."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """As of ``dict``."""
        return dict.fromkeys(*args)


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return _rendered.get().now.strftime(form)


@lru_cache(maxsize=64)
def _compiled(text: str, place: str) -> tuple[Template, bool]:
    """The program, and whether it marks generated text."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    functions = {"raise_exception": _raise_exception, "strftime_now": _strftime_now, "dict": _SafeDict(), "namespace": _SafeNamespace}
    environment.globals.update(functions)
    try:
        template = environment.from_string(text)
    except TemplateSyntaxError as error:
        raise UserError(f"{place}, line {error.lineno}: {error.message}; correct the template") from None
    generation = environment.extensions[_Generation.identifier]
    return template, isinstance(generation, _Generation) and generation.used


def _run(template: Template, variables: Mapping[str, Any], place: str) -> str:
    try:
        return template.render(variables)
    except TemplateError as error:
        raise UserError(f"{place}: {error.message or type(error).__name__}") from None
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
        raise UserError(f"{place}: it cannot write these messages: {error}; look at their form, or at the template") from None
