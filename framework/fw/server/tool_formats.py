"""How model families write function calls."""

from __future__ import annotations

import ast
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fw.server.tool_text import JSON, PYTHON, SPACE, Malformed, Reading, Text, as_json, end_of, json_of, literal_of, parsed, python_tree
from fw.server.tool_values import converted

Tools = Mapping[str, Mapping[str, Any]]
"""The schema of a function's parameters, by its name."""
NamedCall = tuple[str, str]
"""A function's name and its arguments as JSON text."""

_NAME = re.compile(r"[a-zA-Z0-9_-]*")
_ATTRIBUTE = re.compile(r"[^<>\n]*")


def named_call(value: Any, tools: Tools, arguments_required: bool = False) -> NamedCall:
    """A call written as a JSON object with ``name`` and ``arguments`` (or ``parameters``).

    Arguments that are a JSON text in a string are taken out of it, as vLLM does; another string is left to the client.

    Raises:
        Malformed: there is no such function, or no name.
    """
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in tools:
        raise Malformed
    key = next((key for key in ("arguments", "parameters") if key in value), None)
    if key is None and arguments_required:
        raise Malformed
    given = value[key] if key else None
    if given is None or given == "":
        return name, "{}"
    if isinstance(given, str):
        try:
            inner = parsed(given, JSON)
            if isinstance(inner, dict):
                return name, as_json(inner)
        except Malformed:
            pass
    return name, as_json(given)


def _json_value(text: Text, at: int, opening: str) -> Reading[tuple[Any, int]]:
    at = yield from text.run(at, SPACE)
    if (yield from text.char(at)) not in opening:
        raise Malformed
    end = yield from end_of(text, at, JSON)
    return json_of(text.now[at:end]), end


@dataclass(frozen=True)
class Found:
    """Calls that are whole.

    Attributes:
        end: the position after them.
        tail: a marker that is dropped where it follows.
    """

    calls: tuple[NamedCall, ...]
    end: int
    tail: str = ""


class Format(ABC):
    """How a family writes calls.

    Attributes:
        markers: tokens of calls that some tokenizers have as special ones; they must stay in the text when it is decoded.
        opens: what a call begins with, wherever it stands.
        opens_first: what a call begins with at the beginning of an answer and after another call; elsewhere it is text.
        between: what may stand between two calls beside white space.
        key: what arguments are called in JSON.
        architectures: whose own format it is, by the beginnings of their names in lower case.
    """

    markers: ClassVar[tuple[str, ...]]
    opens: ClassVar[tuple[str, ...]]
    opens_first: ClassVar[tuple[str, ...]] = ()
    between: ClassVar[str] = ""
    key: ClassVar[str] = "arguments"
    architectures: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def teaches(self, template: str) -> bool:
        """Whether a chat template asks for calls of this format."""

    @abstractmethod
    def read(self, text: Text, at: int, tools: Tools) -> Reading[Found]:
        """Read what begins there with one of :attr:`opens` or :attr:`opens_first`.

        Raises:
            Malformed: it is no call.
        """

    def call_id(self) -> str:
        """A new one."""
        return f"call_{secrets.token_hex(12)}"


class Hermes(Format):
    """``<tool_call>`` around a JSON object; several one after another. Hermes 2 Pro and 3, Qwen 2.5 and 3, Granite 4.

    An answer that ends after the object, without ``</tool_call>``, has called. The tags are special tokens of some models, not of Qwen's.

    https://huggingface.co/NousResearch/Hermes-2-Pro-Llama-3-8B#prompt-format-for-function-calling,
    https://qwen.readthedocs.io/en/latest/framework/function_call.html,
    https://docs.vllm.ai/en/latest/api/vllm/tool_parsers/hermes_tool_parser/
    """

    markers = ("<tool_call>", "</tool_call>")
    opens = ("<tool_call>",)
    architectures = ("qwen",)
    _taught = re.compile(r'\\?"arguments\\?":')

    def teaches(self, template: str) -> bool:
        """By the tag, with JSON in it (GLM has the same tag around other things)."""
        return "<tool_call>" in template and "<function=" not in template and bool(self._taught.search(template))

    def read(self, text: Text, at: int, tools: Tools) -> Reading[Found]:
        opening, closing = self.markers
        value, at = yield from _json_value(text, at + len(opening), "{")
        call = named_call(value, tools)
        while True:
            if space := SPACE.match(text.now, at):
                at = space.end()
            rest = text.now[at : at + len(closing)]
            if not closing.startswith(rest):
                raise Malformed
            if rest == closing or text.ended:
                return Found((call,), at + len(rest))
            yield


class Llama(Format):
    """The answer is a JSON object with ``name`` and ``parameters``, or several, with ``;`` or nothing between them. Llama 3.1 to 4.

    ``<|python_tag|>``, a special token, may stand before, and there a call may also follow other text; what else may follow it (Python for
    the code interpreter, ``brave_search.call(…)``) is text here. Llama 4 has ``<|python_start|>`` and ``<|python_end|>`` instead. A JSON
    object without parameters is an answer in JSON.

    https://github.com/meta-llama/llama-models/blob/main/models/llama3_3/prompt_format.md (JSON based tool calling),
    https://docs.vllm.ai/en/latest/api/vllm/tool_parsers/llama_tool_parser/
    """

    markers = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")
    opens = ("<|python_tag|>", "<|python_start|>")
    opens_first = ("{",)
    between = ";"
    key = "parameters"
    architectures = ("llama",)
    _taught = re.compile(r'\{\\?"name\\?": [^{}]*\\?"parameters\\?":')
    _keys = ('"name"', '"type"', '"parameters"', '"arguments"')

    def teaches(self, template: str) -> bool:
        """By the form that it describes."""
        return bool(self._taught.search(template))

    def read(self, text: Text, at: int, tools: Tools) -> Reading[Found]:
        tag = yield from text.one_of(at, self.opens)
        at = yield from text.run(at + len(tag), SPACE)
        first = yield from text.run((yield from text.expect(at, "{")), SPACE)
        # An answer in JSON is told by its first key, and need not wait for its end.
        if not (yield from text.one_of(first, self._keys)):
            raise Malformed
        value, end = yield from _json_value(text, at, "{")
        return Found((named_call(value, tools, arguments_required=True),), end, _end_of_tag(tag))


def _end_of_tag(tag: str) -> str:
    return "<|python_end|>" if tag == "<|python_start|>" else ""


class Mistral(Format):
    """``[TOOL_CALLS]`` before a JSON list of calls (tokenizers v2 to v7), or before each name, with ``[ARGS]`` and the arguments after it
    (v11, with ``[CALL_ID]`` and an id between them, and v13). A list has called when it ends, all of it or nothing. These three are special
    tokens.

    Ids of calls are nine letters and digits: chat templates of Mistral refuse others when the calls come back.

    https://github.com/mistralai/mistral-common/blob/main/src/mistral_common/tokens/tokenizers/instruct.py,
    https://docs.vllm.ai/en/latest/api/vllm/tool_parsers/mistral_tool_parser/
    """

    markers = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    opens = ("[TOOL_CALLS]",)
    architectures = ("mistral", "ministral", "mixtral", "pixtral")

    def teaches(self, template: str) -> bool:
        """By the token."""
        return "[TOOL_CALLS]" in template

    def read(self, text: Text, at: int, tools: Tools) -> Reading[Found]:
        calls, call_id, args = self.markers
        at = yield from text.run(at + len(calls), SPACE)
        if (yield from text.char(at)) in "[{":
            value, end = yield from _json_value(text, at, "[{")
            values = value if isinstance(value, list) else [value]
            if not values:
                raise Malformed
            return Found(tuple(named_call(each, tools) for each in values), end)
        end = yield from text.run(at, _NAME)
        name = text.now[at:end]
        if name not in tools:
            raise Malformed
        mark = yield from text.one_of(end, [call_id, args])
        if mark == call_id:
            end = yield from text.run(end + len(mark), _NAME)
            mark = yield from text.one_of(end, [args])
        value, end = yield from _json_value(text, end + len(mark), "{")
        return Found(((name, as_json(value)),), end)

    def call_id(self) -> str:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class Qwen3Coder(Format):
    """``<function=name>`` with a ``<parameter=name>`` for each argument, in ``<tool_call>``. Qwen3-Coder, Qwen 3.5.

    A value is what stands in its tag, without the line breaks at its ends, and becomes what the function's schema says; where it can't, it
    stays a string. A call is whole with ``</function>``: the model sometimes forgets the tag around it, which is no special
    token of Qwen's.

    https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct/blob/main/qwen3coder_tool_parser.py,
    https://github.com/ollama/ollama/issues/16686 (the forgotten tag)
    """

    markers = ("<tool_call>", "</tool_call>")
    opens = ("<tool_call>", "<function=")

    def teaches(self, template: str) -> bool:
        """By the tags."""
        return all(tag in template for tag in ("<tool_call>", "<function=", "<parameter="))

    def read(self, text: Text, at: int, tools: Tools) -> Reading[Found]:
        if (yield from text.one_of(at, self.opens)) == "<tool_call>":
            at = yield from text.run(at + len("<tool_call>"), SPACE)
        name, at = yield from self._attribute(text, (yield from text.expect(at, "<function=")))
        if name not in tools:
            raise Malformed
        arguments: dict[str, Any] = {}
        while True:
            at = yield from text.run(at, SPACE)
            tag = yield from text.one_of(at, ["<parameter=", "</function>"])
            at += len(tag)
            if tag == "</function>":
                return Found(((name, as_json(arguments)),), at, "</tool_call>")
            if not tag:
                raise Malformed
            key, at = yield from self._attribute(text, at)
            end = yield from text.find(at, "</parameter>")
            value = text.now[at:end].removeprefix("\n").removesuffix("\n")
            arguments[key] = converted(value, _property(tools[name], key), tools[name])
            at = end + len("</parameter>")

    def _attribute(self, text: Text, at: int) -> Reading[tuple[str, int]]:
        end = yield from text.run(at, _ATTRIBUTE)
        name = text.now[at:end].strip()
        if not name:
            raise Malformed
        return name, (yield from text.expect(end, ">"))


def _property(parameters: Mapping[str, Any], name: str) -> Any:
    properties = parameters.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return parameters.get("additionalProperties")


class Pythonic(Format):
    """The answer is a Python list of calls with keyword arguments, which are literals. Llama 3.2 to 4, ToolACE.

    Special tokens may stand around it: ``<|python_tag|>``, or in Llama 4 ``<|python_start|>`` and ``<|python_end|>``. A list has called
    when it ends, all of it or nothing. JSON's true, false and null are literals here too.

    https://github.com/meta-llama/llama-models/blob/main/models/llama3_2/text_prompt_format.md,
    https://github.com/meta-llama/llama-models/blob/main/models/llama4/prompt_format.md,
    https://docs.vllm.ai/en/latest/api/vllm/tool_parsers/llama4_pythonic_tool_parser/
    """

    markers = Llama.markers
    opens = Llama.opens
    opens_first = ("[",)
    _taught = re.compile(r"\[func(?:_name)?1\(")

    def teaches(self, template: str) -> bool:
        """By the form that it describes."""
        return bool(self._taught.search(template))

    def read(self, text: Text, at: int, tools: Tools) -> Reading[Found]:
        tag = yield from text.one_of(at, self.opens)
        at = yield from text.run(at + len(tag), SPACE)
        at = yield from text.expect(at, "[")
        calls: list[NamedCall] = []
        while True:
            at = yield from text.run(at, SPACE)
            end = yield from text.run(at, _NAME)
            name = text.now[at:end]
            if name not in tools:
                raise Malformed
            start = yield from text.expect((yield from text.run(end, SPACE)), "(")
            end = yield from end_of(text, start, PYTHON, ")")
            calls.append((name, as_json(_keywords(text.now[start:end]))))
            at = yield from text.run(end, SPACE)
            if (yield from text.char(at)) == "]":
                return Found(tuple(calls), at + 1, _end_of_tag(tag))
            at = yield from text.expect(at, ",")


def _keywords(source: str) -> dict[str, Any]:
    """Arguments, up to the bracket that closes them. The function's name is left out: it need not be one in Python."""
    tree = python_tree(f"f({source}")
    if not isinstance(tree, ast.Call) or tree.args:
        raise Malformed
    found = {}
    for keyword in tree.keywords:
        if keyword.arg is None:
            raise Malformed
        found[keyword.arg] = literal_of(keyword.value)
    return found


FORMATS: Mapping[str, Format] = {
    "qwen3_coder": Qwen3Coder(),
    "hermes": Hermes(),
    "mistral": Mistral(),
    "llama": Llama(),
    "pythonic": Pythonic(),
}
