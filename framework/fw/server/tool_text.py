"""Text that is read while it still grows, and the values in it: JSON, and Python's literals.

Reading is done by generators, which yield where more text is needed and go on where they were; so text costs its length once, in however
small pieces it comes. What can't become a value is told by the first character that doesn't fit.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]

SPACE = re.compile(r"[ \t\r\n]*")
_WORD = re.compile(r"[-+.\w]*")
_PLAIN = {'"': re.compile(r'[^"\\\n]*'), "'": re.compile(r"[^'\\\n]*")}
# Deeper than the arguments of any call, and less than json and ast can take.
_DEPTH = 100


class Malformed(Exception):
    """What began like a call is none."""


class Text:
    """Text that grows. Reading waits for more of it (yields); where the answer has ended instead, there is no call."""

    def __init__(self, now: str = "", ended: bool = False) -> None:
        self.now, self.ended = now, ended

    def char(self, at: int) -> Reading[str]:
        """The character there."""
        while at >= len(self.now):
            if self.ended:
                raise Malformed
            yield
        return self.now[at]

    def one_of(self, at: int, wanted: Sequence[str]) -> Reading[str]:
        """Which of some texts stands there: the longest; an empty one where none does."""
        while True:
            rest = self.now[at : at + max(map(len, wanted))]
            if self.ended or not any(len(each) > len(rest) and each.startswith(rest) for each in wanted):
                return max((each for each in wanted if rest.startswith(each)), key=len, default="")
            yield

    def expect(self, at: int, wanted: str) -> Reading[int]:
        """The position after a text that must stand there."""
        if not (yield from self.one_of(at, [wanted])):
            raise Malformed
        return at + len(wanted)

    def run(self, at: int, pattern: re.Pattern[str]) -> Reading[int]:
        """The position after a run of characters, which may be empty, once something follows it."""
        while True:
            if found := pattern.match(self.now, at):
                at = found.end()
            if at < len(self.now):
                return at
            if self.ended:
                raise Malformed
            yield

    def find(self, at: int, wanted: str) -> Reading[int]:
        """Where a text begins that must come."""
        while (found := self.now.find(wanted, at)) < 0:
            if self.ended:
                raise Malformed
            at = max(at, len(self.now) - len(wanted) + 1)
            yield
        return found


@dataclass(frozen=True)
class Syntax:
    """What tells values of a notation from other text; whether they are right, its own parser says."""

    brackets: Mapping[str, str]
    quotes: str
    separators: str
    word: re.Pattern[str]


JSON = Syntax({"{": "}", "[": "]"}, '"', ",:", re.compile(r"true|false|null|-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?"))
PYTHON = Syntax(
    {"{": "}", "[": "]", "(": ")"},
    "\"'",
    ",:=",
    re.compile(r"[^\W\d]\w*|[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"),
)


def end_of(text: Text, at: int, syntax: Syntax, closers: str = "") -> Reading[int]:
    """Where a value ends, or where ``closers`` close what is open; what can be no literal, such as an operator, is refused."""
    open_ = list(closers)
    while True:
        at = yield from text.run(at, SPACE)
        char = yield from text.char(at)
        if char in syntax.brackets:
            if len(open_) == _DEPTH:
                raise Malformed
            open_.append(syntax.brackets[char])
            at += 1
            continue
        if char in syntax.quotes:
            at = yield from _end_of_string(text, at, syntax)
        elif not (open_ and char == open_[-1]):  # that would be an empty pair, or a comma at the end
            end = yield from text.run(at, _WORD)
            if not syntax.word.fullmatch(text.now, at, end):
                raise Malformed
            at = end
        while True:
            if not open_:
                return at
            at = yield from text.run(at, SPACE)
            char = yield from text.char(at)
            at += 1
            if char in syntax.separators:
                break
            if char != open_.pop():
                raise Malformed


def _end_of_string(text: Text, at: int, syntax: Syntax) -> Reading[int]:
    quote = text.now[at]
    plain = _PLAIN[quote]
    if syntax is PYTHON and (yield from text.one_of(at, [quote * 3])):
        quote *= 3
    at += len(quote)
    while True:
        at = yield from text.run(at, plain)
        char = text.now[at]
        if char == "\\":
            yield from text.char(at + 1)
            at += 2
        elif char == "\n" and len(quote) == 1:
            raise Malformed
        elif (yield from text.one_of(at, [quote])):
            return at + len(quote)
        else:
            at += 1


def parsed(source: str, syntax: Syntax) -> Any:
    """A value in brackets, as JSON or as a Python literal.

    Raises:
        Malformed: it is none.
    """
    source = source.strip()
    reading = end_of(Text(source, ended=True), 0, syntax)
    try:
        next(reading)
    except StopIteration as done:
        if done.value == len(source):
            return json_of(source) if syntax is JSON else literal_of(python_tree(source))
    raise Malformed


def json_of(source: str) -> Any:
    """A JSON text's value, or :class:`Malformed`."""
    try:
        return json.loads(source)
    except (ValueError, RecursionError):
        raise Malformed from None


def python_tree(source: str) -> ast.expr:
    """An expression of Python, or :class:`Malformed`. What :func:`end_of` let through is not too deep for it."""
    try:
        return ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise Malformed from None


def literal_of(node: ast.expr) -> Any:
    """As JSON has it; JSON's own words are taken too, because models that are asked for Python write them."""
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str()):
            return node.value
        case ast.Name(id="true" | "false" | "null"):
            return {"true": True, "false": False, "null": None}[node.id]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=ast.Constant(value=int() | float() as number)):
            return -number if isinstance(node.op, ast.USub) else number
        case ast.List() | ast.Tuple():
            return [literal_of(each) for each in node.elts]
        case ast.Dict():
            return {_key(key): literal_of(value) for key, value in zip(node.keys, node.values, strict=True)}
    raise Malformed


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise Malformed


def as_json(value: Any) -> str:
    """JSON text that can be sent.

    Raises:
        Malformed: JSON has no such value (a number beyond all bounds).
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise Malformed from None
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair has no UTF-8, but an escape
        return json.dumps(value)
    return text
