"""Function ("tool") calls in what a model says: found in the text as it comes, asked for by a schema, checked in a request.

Tools are as OpenAI has them, ``[{"type": "function", "function": {"name", "description", "parameters", "strict"}}]``
(https://platform.openai.com/docs/api-reference/chat/create#chat-create-tools); how model families write calls is in
:mod:`fw.server.tool_formats`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fw.errors import UserError, did_you_mean
from fw.server.tool_formats import FORMATS, Format, Found, named_call
from fw.server.tool_text import JSON, Malformed, Reading, Text, parsed

MOST_TOOLS = 128
"""Of a request, as OpenAI has it."""
Tool = Mapping[str, Any]

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
_SPACE = " \t\r\n"
_WAITING = 200
"""Characters of white space; where a model writes nothing else without end, it shall be seen, and cost what other text does."""
_NOT_SCHEMAS = ("const", "enum", "default", "examples")
"""Keywords of JSON schema with plain data under them."""
_OF_NAMES = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""And with schemas under names that are anybody's."""
_DEPTH = 100
"""Of a schema: the prompt, the grammar and the log all go through it by recursion."""


@dataclass(frozen=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class Call:
    """A function's call.

    Attributes:
        index: its place among the calls of the answer.
        id: a new one, under which its result is to be given back.
        arguments: JSON text; not checked against the function's schema.
    """

    index: int
    id: str
    name: str
    arguments: str


Piece = Content | Call


def family_of(template: str | None, architecture: str = "") -> str | None:
    """Which of :data:`fw.server.tool_formats.FORMATS` a chat template teaches, by what it says of calls; None where it knows none of them.

    Args:
        architecture: the model's class or type; where a template says more than one, its own counts.
    """
    taught = [name for name, each in FORMATS.items() if template and each.teaches(template)]
    own = (name for name in taught if architecture.lower().startswith(FORMATS[name].architectures))
    return next(own, taught[0] if taught else None)


def format_named(name: str) -> Format:
    """The format of a family.

    Raises:
        UserError: there is none of that name.
    """
    if name not in FORMATS:
        raise UserError(f"tool calls: there is no format '{name}'{did_you_mean(name, FORMATS)} (there are: {', '.join(FORMATS)})")
    return FORMATS[name]


class ToolCalls:
    """Tells calls from content in an answer as it comes (without its reasoning: that is no part of what is pushed).

    Text is given as soon as it can't belong to a call, a call once it is whole. How the answer is split changes neither the calls nor the
    content as a whole. What looks like a call and is none (it is broken, its function unknown, or the answer ends in it) is content, as it
    is. White space before and between calls and after the last one is dropped (200 characters of it), and so are the markers of calls; all
    else is kept, and nothing raises.

    Args:
        format: a family, as :func:`family_of` names it.
        tools: what may be called.

    Raises:
        UserError: there is no such format.
    """

    def __init__(self, format: str, tools: Sequence[Tool]) -> None:
        self._format = format_named(format)
        self._tools = _parameters(tools)
        self._opens = re.compile("|".join(map(re.escape, self._format.opens)))
        self._text = Text()
        self._at = 0  # the text before it has been given
        self._reading: Reading[Found] | None = None
        self._opening = 0  # the position after what began the call that is being read
        self._first = True  # whether the text is the beginning of the answer or follows a call
        self._calls = 0
        self._tail = ""

    def push(self, text: str) -> list[Piece]:
        """What further text completes."""
        self._text.now += text
        return self._advance()

    def finish(self) -> list[Piece]:
        """The rest: the answer has ended."""
        self._text.ended = True
        return self._advance()

    def _advance(self) -> list[Piece]:
        pieces: list[Piece] = []
        while True:
            if self._reading is None:
                self._reading = self._open(pieces)
            if self._reading is None:
                self._text.now, self._at = self._text.now[self._at :], 0
                return pieces
            try:
                next(self._reading)
                return pieces
            except Malformed:
                # What began it is no beginning, and what follows is looked at anew.
                self._first = False
                self._give(pieces, self._opening)
            except StopIteration as done:
                self._called(pieces, done.value)
            self._reading = None

    def _open(self, pieces: list[Piece]) -> Reading[Found] | None:
        """Give what comes before the next call and begin to read that; None where there is none as yet."""
        if self._first:
            at, opens, waits = self._beginning()
            if opens or waits:
                return self._read(at, opens) if opens else None
            self._first = False
        text = self._text.now
        found = self._opens.search(text, self._at)
        if found is None and self._text.ended:
            self._give(pieces, len(text))
            return None
        at = found.start() if found else len(text) - max(_begins(text[self._at :], opens) for opens in self._format.opens)
        # White space waits, to be dropped if a call follows.
        self._give(pieces, max(self._at + len(text[self._at : at].rstrip(_SPACE)), at - _WAITING))
        return self._read(at, found[0]) if found else None

    def _beginning(self) -> tuple[int, str, bool]:
        """At the beginning of the answer or after a call: where the next call begins, with what; whether this is not yet known."""
        text = self._text
        between = _SPACE + (self._format.between if self._calls else "")
        while True:
            known = (*self._format.opens, *self._format.opens_first, *([self._tail] if self._tail else []))
            near = text.now[self._at : self._at + _WAITING + 1]
            space = len(near) - len(near.lstrip(between))
            at = self._at + space
            if space > _WAITING:
                return at, "", False
            opens = max((each for each in known if text.now.startswith(each, at)), key=len, default="")
            if not opens or opens != self._tail:
                break
            self._at, self._tail = at + len(opens), ""
        if text.ended:
            if self._calls and not near.strip(_SPACE):
                self._at = len(text.now)
            return at, opens, self._at == len(text.now)
        left = len(text.now) - at
        return at, opens, any(len(each) > left and text.now.startswith(each[:left], at) for each in known)

    def _read(self, at: int, opens: str) -> Reading[Found]:
        self._opening = at + len(opens)
        return self._format.read(self._text, at, self._tools)

    def _called(self, pieces: list[Piece], found: Found) -> None:
        for name, arguments in found.calls:
            pieces.append(Call(self._calls, self._format.call_id(), name, arguments))
            self._calls += 1
        self._at = found.end
        self._first = True
        self._tail = found.tail or self._tail

    def _give(self, pieces: list[Piece], end: int) -> None:
        """The text up to there, as content."""
        if end <= self._at:
            return
        text = self._text.now[self._at : end]
        self._at, self._tail = end, ""
        if pieces and isinstance(last := pieces[-1], Content):
            pieces[-1] = Content(last.text + text)
        else:
            pieces.append(Content(text))


def _begins(text: str, marker: str) -> int:
    """How many characters at the end of a text are a beginning of a marker, but not all of it."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:])), 0)


def _parameters(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any]]:
    return {tool["function"]["name"]: tool["function"].get("parameters") or _NO_PARAMETERS for tool in tools}


def forced_schema(format: str, tools: Sequence[Tool], name: str | None = None) -> dict[str, Any]:
    """What an answer that must call a function has to follow: a JSON schema of one call.

    Args:
        name: which function; any of them where it is None.

    Raises:
        UserError: there is no such format.
    """
    key = format_named(format).key
    wanted = [(each, parameters) for each, parameters in _parameters(tools).items() if name in (None, each)]
    if len(wanted) == 1:
        return _call_schema(*wanted[0], key, "#")
    return {"anyOf": [_call_schema(each, parameters, key, f"#/anyOf/{i}") for i, (each, parameters) in enumerate(wanted)]}


def _call_schema(name: str, parameters: Mapping[str, Any], key: str, place: str) -> dict[str, Any]:
    properties = {"name": {"const": name}, key: _moved(parameters, f"{place}/properties/{key}")}
    return {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}


def _moved(schema: Any, place: str) -> Any:
    """A schema that stands at a place in another one: what it refers to in itself is there."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = dict[str, Any]()
    for key, value in schema.items():
        if key in _OF_NAMES and isinstance(value, Mapping):
            moved[key] = {name: _moved(each, place) for name, each in value.items()}
        else:
            moved[key] = value if key in _NOT_SCHEMAS else _moved(value, place)
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved


def forced_calls(text: str, format: str, tools: Sequence[Tool]) -> list[Call]:
    """The call in an answer that followed :func:`forced_schema`; none where the answer is not whole.

    Raises:
        UserError: there is no such format.
    """
    known = format_named(format)
    try:
        name, arguments = named_call(parsed(text, JSON), _parameters(tools))
    except Malformed:
        return []
    return [Call(0, known.call_id(), name, arguments)]


def check_tools(tools: Any, tool_choice: Any = None) -> None:
    """Check ``tools`` and ``tool_choice`` of a request; no tools are None or an empty list.

    Raises:
        UserError: something is wrong with them.
    """
    if tools is not None and not isinstance(tools, list):
        raise UserError(f"tools: it is a {type(tools).__name__}; give a list of tools")
    if tools is not None and len(tools) > MOST_TOOLS:
        raise UserError(f"tools: {len(tools)} are more than the {MOST_TOOLS} that a request may have; give fewer")
    names: dict[str, int] = {}
    for i, tool in enumerate(tools or []):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(function, dict):
            raise UserError(f'tools[{i}]: it is no function; write {{"type": "function", "function": {{"name": …, "parameters": …}}}}')
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UserError(f"tools[{i}].function.name: {name!r} is no name; give 1 to 64 letters, digits, '_' and '-'")
        if name in names:
            raise UserError(f"tools[{i}].function.name: '{name}' is the name of tools[{names[name]}] too; rename one of them")
        names[name] = i
        _check_parameters(function.get("parameters"), f"tools[{i}].function.parameters")
    _check_choice(tool_choice, names)


def _check_parameters(parameters: Any, place: str) -> None:
    if parameters is None or parameters == {}:
        return
    if not isinstance(parameters, dict) or (parameters.get("type", "object" if "properties" in parameters else None) != "object"):
        raise UserError(f'{place}: it is no JSON schema of an object; write {{"type": "object", "properties": {{…}}}}')
    properties = parameters.get("properties", {})
    if not isinstance(properties, dict):
        raise UserError(f"{place}.properties: it is a {type(properties).__name__}; give an object with a schema for each parameter")
    for name, schema in properties.items():
        if not isinstance(schema, dict | bool):
            raise UserError(f"{place}.properties.{name}: it is a {type(schema).__name__}; give a JSON schema")
    inside: list[Any] = [parameters]
    for _ in range(_DEPTH):
        inside = [each for one in inside for each in (one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())]
    if inside:
        raise UserError(f"{place}: it is nested more than {_DEPTH} levels deep; give a flatter schema")


def _check_choice(choice: Any, names: Collection[str]) -> None:
    if choice is None or choice == "none":
        return
    if choice not in ("auto", "required"):
        function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise UserError(
                f"tool_choice: {choice!r} is neither none, auto, required nor a function;"
                ' name one as {"type": "function", "function": {"name": …}}'
            )
        if names and name not in names:
            near = did_you_mean(name, names) if _NAME.fullmatch(name) else ""  # what is no name may be of any length
            raise UserError(f"tool_choice: there is no function '{name}' in tools{near}; name one that is there")
    if not names:
        raise UserError("tool_choice: there are no tools to choose from; give tools, or leave it out")
