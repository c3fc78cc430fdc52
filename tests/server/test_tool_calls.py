import json
import re
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fw.errors import UserError
from fw.server import tool_formats
from fw.server.tool_calls import Call, Content, ToolCalls, check_tools, family_of, forced_calls, forced_schema
from fw.server.tool_formats import FORMATS


def tool(name, properties=None, **rest):
    parameters = {} if properties is None else {"parameters": {"type": "object", "properties": properties, **rest}}
    return {"type": "function", "function": {"name": name, "description": f"it does {name}", **parameters}}


WEATHER = {"city": {"type": "string"}, "metric": {"type": "string"}, "days": {"type": "integer"}}
TOOLS = [
    tool("get_weather", WEATHER, required=["city"]),
    tool("get_weather_now", {"city": {"type": "string"}}),
    tool("now"),
    tool("get-time", {"zone": {"type": "string"}}),
    tool("add", {"a": {"type": "number"}, "b": {"type": "number"}}),
    tool("write", {"file": {"type": "string"}, "text": {"type": "string"}, "options": {"type": "object"}, "tags": {"type": "array"}}),
]
SF = ("get_weather", {"city": "San Francisco", "metric": "celsius"})
SEATTLE = ("get_weather", {"city": "Seattle", "metric": "celsius"})
NOW = ("now", {})

# Answers as the models write them; the places that say so are named in the formats' docstrings. (format, answer, content, calls)
SAMPLES = [
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "", [NOW]),
    (
        "hermes",
        'Let me look.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "San Francisco", "metric": "celsius"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Seattle", "metric": "celsius"}}\n</tool_call>',
        "Let me look.",
        [SF, SEATTLE],
    ),
    # arguments first and spaces around, as in Hermes' own template
    ("hermes", '\n<tool_call>\n{ "arguments": {"zone": "CET"}, "name": "get-time"}\n</tool_call> ', "", [("get-time", {"zone": "CET"})]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call> and then?', " and then?", [NOW]),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": -2.5e-3}}', "", [("add", {"a": 1, "b": -0.0025})]),  # until the end
    ("hermes", '<tool_call>\n{"name": "now", "arguments": "{}"}\n</tool_call>', "", [NOW]),
    (
        "hermes",
        '<tool_call>\n{"name": "write", "arguments": {"text": "as in <tool_call>{\\"name\\": 1}</tool_call> \\\\", '
        '"tags": []}}\n</tool_call>',
        "",
        [("write", {"text": 'as in <tool_call>{"name": 1}</tool_call> \\', "tags": []})],
    ),
    ("hermes", '<tool_call>{"name": "no</tool_call><tool_call>{"name": "now"}</tool_call>', '<tool_call>{"name": "no</tool_call>', [NOW]),
    ("hermes", '<tool_call><tool_call>{"name": "now"}</tool_call>', "<tool_call>", [NOW]),
    ("llama", '{"name": "get_weather", "parameters": {"city": "San Francisco", "metric": "celsius"}}', "", [SF]),
    ("llama", '<|python_tag|>{\n    "type": "function",\n    "name": "now",\n    "parameters": {}\n}', "", [NOW]),
    ("llama", '{"name": "now", "parameters": {}}; {"name": "now", "arguments": {}}\n{"name": "now", "parameters": null}', "", [NOW] * 3),
    ("llama", '{"name": "now", "parameters": {}}{"name": "add", "parameters": {"a": 1}} ;\n', " ;\n", [NOW, ("add", {"a": 1})]),
    ("llama", 'I look.<|python_tag|>{"name": "now", "parameters": {}}; that was it', "I look.; that was it", [NOW]),
    ("llama", '<|python_start|>{"name": "now", "parameters": {}};{"name": "now", "parameters": {}}<|python_end|>', "", [NOW, NOW]),
    (
        "llama",
        '<|python_start|>{"name": "now", "parameters": {}} and<|python_tag|>{"name": "now", "parameters": {}}<|python_end|>',
        " and<|python_end|>",
        [NOW, NOW],
    ),
    ("mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "San Francisco", "metric": "celsius"}}]', "", [SF]),
    (
        "mistral",
        'Hello[TOOL_CALLS][{"arguments": {"a": 3.5, "b": 4}, "name": "add", "id": "vAHMlFC9r"}, {"name": "now", "arguments": ""}]\nmore',
        "Hello\nmore",
        [("add", {"a": 3.5, "b": 4}), NOW],
    ),
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "San Francisco", "metric": "celsius"}', "", [SF]),
    ("mistral", 'so[TOOL_CALLS]add[CALL_ID]vAHMlFC9r[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}', "so", [("add", {"a": 1}), NOW]),
    ("mistral", '[TOOL_CALLS]add{"a": 3.5, "b": 4}[TOOL_CALLS]now{}', "", [("add", {"a": 3.5, "b": 4}), NOW]),
    (
        "qwen3_coder",
        "Sure!\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nSan Francisco\n</parameter>\n<parameter=metric>\ncelsius\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "Sure!",
        [SF, NOW],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=write>\n<parameter=text>\n\nif a < b:\n    c = '</function>'\n\n</parameter>\n"
        '<parameter=options>\n{"mode": "a",\n "deep": {"x": [1, null]}}\n</parameter>\n<parameter=tags>\n[]\n</parameter>\n'
        "</function>\n</tool_call>\n",
        "",
        [("write", {"text": "\nif a < b:\n    c = '</function>'\n", "options": {"mode": "a", "deep": {"x": [1, None]}}, "tags": []})],
    ),
    ("qwen3_coder", "I do it.\n<function=add>\n<parameter=a>2</parameter>\n</function>\n</tool_call>", "I do it.", [("add", {"a": 2})]),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</function>", "", [NOW]),
    (
        "pythonic",
        "[get_weather(city='San Francisco', metric='celsius'), get_weather(city=\"Seattle\", metric=\"celsius\")]",
        "",
        [SF, SEATTLE],
    ),
    ("pythonic", '<|python_tag|>[get_weather(city="San Francisco", metric="celsius")]', "", [SF]),
    ("pythonic", "<|python_start|>[now(),add(a=-1,b=+.5)]<|python_end|>", "", [NOW, ("add", {"a": -1, "b": 0.5})]),
    (
        "pythonic",
        "[write(text='it\\'s \"so\"\\n', options={'a': [True, None, (1, 2)], 'b': {}}, tags=[false, null, true,])] Done.",
        " Done.",
        [("write", {"text": 'it\'s "so"\n', "options": {"a": [True, None, [1, 2]], "b": {}}, "tags": [False, None, True]})],
    ),
    ("pythonic", r"[write(text='\d+\x41\\')]", "", [("write", {"text": "\\d+A\\"})]),
    ("pythonic", "[ get-time ( zone = '''C'E\nT''', ) ]", "", [("get-time", {"zone": "C'E\nT"})]),
]

BROKEN = [
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_call>\n</tool_call>"),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {"a": 1 "b": 2}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {"a", "b"}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {"a": 1e999}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {"a": NaN}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {"a": 007}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {"a": ' + "9" * 6000 + "}}\n</tool_call>"),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": ' + "[" * 3000 + "]" * 3000 + "}\n</tool_call>"),
    ("hermes", '<tool_call>\n{"name": "later", "arguments": {}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": ' + "[" * 150 + "]" * 150 + "}\n</tool_call>"),
    ("hermes", '<tool_call>\n{"name": ["now"], "arguments": {}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"arguments": {}}\n</tool_call>'),
    ("hermes", '<tool_call>\n[{"name": "now", "arguments": {}}]\n</tool_call>'),
    ("hermes", ' <tool_call>\n{"name": "now", "arguments": {}} or so </tool_call> '),
    ("hermes", '{"name": "now", "arguments": {}}'),
    ("llama", '{"name": "now", "parameters": {}'),
    ("llama", '{"name": "now"}'),
    ("llama", '{"name": "later", "parameters": {}}'),
    ("llama", '{"answer": {"name": "now", "parameters": {}}}'),
    ("llama", 'It is {"name": "now", "parameters": {}}'),
    ("llama", '<|python_tag|>brave_search.call(query="now")'),
    ("llama", '<|python_tag|>; {"name": "now", "parameters": {}}'),
    ("llama", '; {"name": "now", "parameters": {}}'),
    ("llama", "{}"),
    ("llama", '{{"name": "now", "parameters": {}}'),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS] []"),
    ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}}'),
    ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "later", "arguments": {}}]'),
    ("mistral", "[TOOL_CALLS] [now]"),
    ("mistral", "[TOOL_CALLS]now"),
    ("mistral", "[TOOL_CALLS]now[ARGS]"),
    ("mistral", "[TOOL_CALLS]now[ARGS][]"),
    ("mistral", "[TOOL_CALLS]later[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]now[CALL_ID]123456789{}"[:-1]),
    ("mistral", 'now[ARGS]{"a": 1}'),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=later>\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=>\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=now>\n<parameter=a>\n1\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=now>\n<parameter=>\n1\n</parameter>\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=now>\nso\n</function>\n</tool_call>"),
    ("qwen3_coder", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
    ("pythonic", "[]"),
    ("pythonic", "[now]"),
    ("pythonic", "[now()"),
    ("pythonic", "[now(), later()]"),
    ("pythonic", "[now(),]"),
    ("pythonic", "[now() now()]"),
    ("pythonic", "now()"),
    ("pythonic", "So: [now()]"),
    ("pythonic", "[add(1, 2)]"),
    ("pythonic", "[add(a=1+1)]"),
    ("pythonic", "[add(a=b)]"),
    ("pythonic", "[add(a=now())]"),
    ("pythonic", "[add(a=b'c')]"),
    ("pythonic", "[add(a=1j)]"),
    ("pythonic", "[add(a={1, 2})]"),
    ("pythonic", "[add(a={1: 2})]"),
    ("pythonic", "[add(a=1e999)]"),
    ("pythonic", "[add(a=...)]"),
    ("pythonic", "[add(a='x\ny')]"),
    ("pythonic", "[add(**{'a': 1})]"),
    ("pythonic", "[add(a=(1])]"),
    ("pythonic", "[add(a=" + "[" * 3000 + "]" * 3000 + ")]"),
    ("pythonic", "[Paris](https://example.org)"),
    ("pythonic", "[add(a=" + "[" * 150 + "]" * 150 + ")]"),
    ("pythonic", "[[now()]]"),
    ("pythonic", '[add(a="\\N{NO SUCH CHARACTER}")]'),
    ("pythonic", "[add(a='\0')]"),
]


def pushed(format, pieces, tools=TOOLS):
    calls = ToolCalls(format, tools)
    return [piece for text in pieces for piece in calls.push(text)] + calls.finish()


def told(pieces):
    """Content as a whole, and the calls."""
    calls = [piece for piece in pieces if isinstance(piece, Call)]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert all(piece.text for piece in pieces if isinstance(piece, Content))
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    return content, [(call.name, json.loads(call.arguments)) for call in calls]


def ids_of(samples):
    return [f"{sample[0]}-{i}" for i, sample in enumerate(samples)]


@pytest.mark.parametrize(("format", "text", "content", "calls"), SAMPLES, ids=ids_of(SAMPLES))
def test_an_answer(format, text, content, calls):
    assert told(pushed(format, [text])) == (content, calls)


@pytest.mark.parametrize(("format", "text"), BROKEN, ids=ids_of(BROKEN))
def test_what_is_no_call_is_content(format, text):
    assert told(pushed(format, [text])) == (text, [])
    assert told(pushed(format, [*text])) == (text, [])
    assert told(pushed(format, ["\n" + text + "\n"])) == ("\n" + text + "\n", [])


@pytest.mark.parametrize(("format", "text", "content", "calls"), SAMPLES, ids=ids_of(SAMPLES))
def test_every_split(format, text, content, calls):
    expected = (content, calls)
    assert told(pushed(format, [*text])) == expected
    for at in range(len(text) + 1):
        assert told(pushed(format, [text[:at], "", text[at:]])) == expected, at
    for size in range(2, 9):
        assert told(pushed(format, [text[at : at + size] for at in range(0, len(text), size)])) == expected, size


@pytest.mark.parametrize(("format", "text", "content", "calls"), SAMPLES, ids=ids_of(SAMPLES))
def test_every_answer_that_is_cut_off(format, text, content, calls):
    for at in range(len(text)):
        kept, some = told(pushed(format, [text[:at]]))
        assert some == calls[: len(some)], at
        assert some or kept == text[:at], at
        assert told(pushed(format, [*text[:at]])) == (kept, some), at


@pytest.mark.parametrize("format", FORMATS)
def test_order_is_kept(format):
    text, calls = next((text, calls) for name, text, content, calls in SAMPLES if name == format and not content and len(calls) == 1)
    if FORMATS[format].opens_first:
        text = FORMATS[format].opens[0] + text.removeprefix(FORMATS[format].opens[0])
    parser = ToolCalls(format, TOOLS)
    pieces = parser.push(f"one {text.strip()}two {text.strip()}three") + parser.finish()
    assert [piece.text if isinstance(piece, Content) else (piece.name, json.loads(piece.arguments)) for piece in pieces] == [
        "one",
        calls[0],
        "two",
        calls[0],
        "three",
    ]


FRAGMENTS = {
    name: sorted(
        {
            *format.markers,
            *format.opens,
            *format.opens_first,
            *(piece for sample in SAMPLES if sample[0] == name for piece in re.split(r"\b", sample[1])),
        }
    )
    for name, format in FORMATS.items()
}
SPECIALS = [
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    '"',
    "'",
    "\\",
    "=",
    ",",
    ":",
    ";",
    " ",
    "\n",
    " " * 150,
    "<",
    ">",
    "now",
    '"name":',
    "🙂",
    "\ud800",
    "\0",
    "-1e9",
    "'''",
]


@st.composite
def answers(draw, format):
    """Calls, pieces of calls and other text; and how it is split."""
    whole = [sample[1] for sample in SAMPLES + BROKEN if sample[0] == format and len(sample[1]) < 1000]
    part = st.one_of(st.sampled_from(whole), st.sampled_from(FRAGMENTS[format]), st.sampled_from(SPECIALS), st.text(max_size=4))
    text = "".join(draw(st.lists(part, max_size=12)))
    cuts = sorted({0, len(text), *draw(st.lists(st.integers(0, len(text)), max_size=10))})
    return text, [text[a:b] for a, b in pairwise(cuts)]


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_text(format, data):
    text, pieces = data.draw(answers(format))
    content, calls = told(pushed(format, [text]))
    assert told(pushed(format, pieces)) == (content, calls)
    assert told(pushed(format, [*text])) == (content, calls)
    if not calls:
        assert content == text
    rest = iter(text)
    assert all(character in rest for character in content), "content is not in the text, in its order"
    # None of the functions is known: there are no calls.
    assert told(pushed(format, pieces, tools=[])) == (text, [])


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_nothing_between_calls_is_lost(format, data):
    """Around calls, what is no part of one comes back."""
    word = st.text("ab<[{(|\"'\\.,", min_size=1, max_size=6).map(lambda text: f"x{text}x")
    marked = [
        (text, calls) for name, text, content, calls in SAMPLES if name == format and not content and text.startswith(FORMATS[format].opens)
    ]
    closed = [(text, calls) for text, calls in marked if told(pushed(format, [text, "x"])) == ("x", calls)]
    assert closed
    parts = data.draw(st.lists(st.tuples(word, st.sampled_from(closed)), min_size=1, max_size=4))
    text = "".join(before + call for before, (call, _) in parts)
    expected = "".join(before for before, _ in parts), [call for _, (_, calls) in parts for call in calls]
    assert told(pushed(format, [*text])) == expected


def test_text_is_given_at_once():
    for format in FORMATS:
        parser = ToolCalls(format, TOOLS)
        assert parser.push("It is") == [Content("It is")], format
        assert parser.push(" fine, ") == [Content(" fine,")], format  # white space may stand before a call
        assert parser.push("I say") == [Content(" I say")], format
        for marker in FORMATS[format].opens:
            assert parser.push(marker[:-1]) == [], format
            assert parser.push("~") == [Content(marker[:-1] + "~")], format
        assert parser.push("a < b [c] {d} | e") == [Content("a < b [c] {d} | e")], format
        assert parser.finish() == [], format


def test_an_answer_in_json_is_given_at_once():
    parser = ToolCalls("llama", TOOLS)
    assert parser.push('{"') == []
    assert parser.push("na") == []
    assert parser.push("tion") == [Content('{"nation')]
    assert parser.push('": {"name"') == [Content('": {"name"')]
    parser = ToolCalls("pythonic", TOOLS)
    assert parser.push("[get_weather") == []
    assert parser.push("ing](") == [Content("[get_weathering](")]


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", "<tool_call>[1"),
        ("hermes", "<tool_call>{name:"),
        ("hermes", '<tool_call>{"name\nx'),
        ("hermes", '<tool_call>{"a": 1, b '),
        ("hermes", '<tool_call>{"a": so '),
        ("hermes", '<tool_call>{"a": [1}'),
        ("hermes", '<tool_call>{"a" "b'),
        ("hermes", '<tool_call>{"name": "later"}'),
        ("hermes", '<tool_call>{"name": "now"} x'),
        ("llama", '<|python_tag|>{"answer": "'),
        ("mistral", "[TOOL_CALLS](now"),
        ("mistral", "[TOOL_CALLS]later{"),
        ("qwen3_coder", "<tool_call>x"),
        ("qwen3_coder", "<tool_call><function=later>"),
        ("qwen3_coder", "<function=a<b"),
        ("qwen3_coder", "<function=now>x"),
        ("pythonic", "[add(a=^"),
        ("pythonic", "[add(a='x\ny"),
        ("pythonic", "[add(a=-now "),
        ("pythonic", "[add(a=[1)"),
        ("pythonic", "[add(a=1- "),
        ("pythonic", "[add(a=1) so"),
    ],
)
def test_what_can_be_no_call_any_more_is_given_at_once(format, text):
    """By the first character that doesn't fit: what comes after it is not waited for."""
    parser = ToolCalls(format, TOOLS)
    before = "".join(piece.text for piece in parser.push(text[:-1]))
    assert before + "".join(piece.text for piece in parser.push(text[-1:])) == text.rstrip()


WHOLE = {
    "hermes": ('<tool_call>{"name": "now", "arguments": {}}', "</tool_call>"),
    "llama": ('{"name": "now", "parameters": {}', "}"),
    "mistral": ('[TOOL_CALLS][{"name": "now", "arguments": {}}', "]"),
    "qwen3_coder": ("<tool_call>\n<function=now>\n</function", ">"),
    "pythonic": ("[now()", "]"),
}


@pytest.mark.parametrize("format", FORMATS)
def test_a_call_is_given_when_it_is_whole(format):
    most, last = WHOLE[format]
    parser = ToolCalls(format, TOOLS)
    assert parser.push(most + last[:-1]) == []
    (call,) = parser.push(last[-1])
    assert (call.name, call.arguments) == ("now", "{}")
    assert parser.push(" ") == parser.finish() == parser.finish() == []


def test_ids():
    for format in FORMATS:
        text = "".join(WHOLE[format])
        found = {call.id for _ in range(20) for call in pushed(format, [text])}
        shape = "[a-zA-Z0-9]{9}" if format == "mistral" else "call_[0-9a-f]{24}"
        assert len(found) == 20 and all(re.fullmatch(shape, each) for each in found)


def test_white_space_and_separators():
    call = '{"name": "now", "parameters": {}}'
    for text, content in [
        (f"\n {call} ;\n {call}\n", ""),
        (f"{call} ; x", " ; x"),
        (f"{call}\n\nand {call}", f"\n\nand {call}"),
        (f"{call};", ";"),
        (" \n", " \n"),
    ]:
        assert told(pushed("llama", [*text]))[0] == content, text
    assert told(pushed("hermes", ["a \n\n", "\n", "<tool", "_x"]))[0] == "a \n\n\n<tool_x"


@pytest.mark.parametrize("format", ["hermes", "llama"])
def test_white_space_without_end_is_given(format):
    """Nothing is kept waiting for ever, and no matter how it comes, the same is dropped before a call."""
    call = {"hermes": '<tool_call>{"name": "now"}</tool_call>', "llama": '<|python_tag|>{"name": "now", "parameters": {}}'}[format]
    for before in ("", "a", call):
        for length in (199, 200, 201, 500):
            text = f"{before}{' ' * length}{call}{' ' * length}"
            kept = "a" * (before == "a") + " " * (max(length - 200, 0) + (length if length > 200 else 0))
            assert told(pushed(format, [text])) == told(pushed(format, [*text])) == (kept, [NOW] * (1 + (before == call)))
    parser = ToolCalls(format, TOOLS)
    assert sum(len(piece.text) for _ in range(1000) for piece in parser.push("\n")) == 800


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('"{\\"city\\": \\"Köln\\"}"', '{"city": "Köln"}'),
        ('" {} "', "{}"),
        ('"hello"', '"hello"'),
        ('"[1]"', '"[1]"'),
        ('"{\\"a\\": NaN}"', '"{\\"a\\": NaN}"'),
        ('"{\\"a\\": 1e999}"', '"{\\"a\\": 1e999}"'),
        ("[1, 2]", "[1, 2]"),
        ("null", "{}"),
        ('{"a": "\\ud83d\\ude42 \\u00e9"}', '{"a": "🙂 é"}'),
        ('{"a": "\\ud83d"}', '{"a": "\\ud83d"}'),
        ('{"a": 12345678901234567890, "a": 1.0}', '{"a": 1.0}'),
    ],
)
def test_arguments_are_json_that_can_be_sent(arguments, expected):
    (call,) = pushed("hermes", [f'<tool_call>{{"name": "now", "arguments": {arguments}}}</tool_call>'])
    assert call.arguments == expected
    call.arguments.encode()


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"type": "string"}, "42", "42"),
        ({"type": "string"}, " 42\n", " 42\n"),
        ({"type": "string"}, "null", "null"),
        ({"type": "integer"}, " 42 ", 42),
        ({"type": "integer"}, "42.0", 42),
        ({"type": "integer"}, "42.5", "42.5"),
        ({"type": "integer"}, "many", "many"),
        ({"type": "integer"}, "null", None),
        ({"type": "integer"}, "9" * 6000, "9" * 6000),
        ({"type": "number"}, "42", 42),
        ({"type": "number"}, "-1.5e3", -1500.0),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "null"}, "None", None),
        ({"type": "array"}, '["a", 1]', ["a", 1]),
        ({"type": "array"}, "['a', True, None]", ["a", True, None]),
        ({"type": "array"}, '{"a": 1}', '{"a": 1}'),
        ({"type": "object"}, '{"a": {"b": []}}', {"a": {"b": []}}),
        ({"type": "object"}, "{'a': 1}", {"a": 1}),
        ({"type": "object"}, "{broken", "{broken"),
        ({"type": "object"}, "{} {}", "{} {}"),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": ["integer", "null"]}, "7", 7),
        ({"type": ["integer", "string"]}, "seven", "seven"),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, "true", True),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "7", "7"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "7", 7),
        ({"$ref": "#/$defs/count"}, "7", 7),
        ({"allOf": [{"$ref": "#/$defs/count"}]}, "7", 7),
        ({"$ref": "#/$defs/nowhere"}, "7", "7"),
        ({"$ref": "#/$defs/itself"}, "7", "7"),
        ({"enum": ["a", "b"]}, "a", "a"),
        ({}, "7", "7"),
        (True, "7", "7"),
    ],
)
def test_values_become_what_the_schema_says(schema, value, expected):
    definitions = {"count": {"type": "integer"}, "itself": {"anyOf": [{"$ref": "#/$defs/itself"}] * 3}}
    tools = [tool("f", {"x": schema}, **{"$defs": definitions})]
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>\n</tool_call>"
    _, ((_, arguments),) = told(pushed("qwen3_coder", [text], tools))
    assert arguments == {"x": expected} and type(arguments["x"]) is type(expected)


def test_values_of_parameters_that_the_schema_does_not_name():
    text = "<function=f>\n<parameter=x>\n7\n</parameter>\n</function>"
    for tools, expected in [([tool("f")], "7"), ([tool("f", {}, additionalProperties={"type": "integer"})], 7)]:
        assert told(pushed("qwen3_coder", [text], tools)) == ("", [("f", {"x": expected})])


def test_a_call_is_read_once(monkeypatch):
    """However many pieces it comes in."""
    reads = []
    original = tool_formats.json_of
    monkeypatch.setattr(tool_formats, "json_of", lambda text: reads.append(text) or original(text))
    text = '<tool_call>{"name": "write", "arguments": {"text": "' + "words and more words " * 500 + '"}}</tool_call>'
    _, calls = told(pushed("hermes", [*text]))
    assert len(calls) == 1 and len(reads) == 1


@pytest.mark.parametrize(("format", "text"), [("qwen3", "x"), ("Hermes", "x")])
def test_an_unknown_format(format, text):
    with pytest.raises(
        UserError, match=rf"tool calls: there is no format '{format}'; did you mean '\w+'\? \(there are: qwen3_coder, hermes,"
    ):
        ToolCalls(format, TOOLS)


# Lines of chat templates, as far as they say how calls are written.
TEMPLATES = [
    (None, "", None),
    ("", "", None),
    ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}", "Qwen2ForCausalLM", None),
    (
        '{{- "in XML:\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>" }}',
        "",
        "hermes",
    ),
    ('{{- \'<tool_call>\\n{"name": "\' }}{{- call.name }}{{- \'", "arguments": \' }}', "Qwen3ForCausalLM", "hermes"),
    (
        "{{- 'Format:\\n<tool_call>\\n<function=example>\\n<parameter=p>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>' }}",
        "qwen3_moe",
        "qwen3_coder",
    ),
    (
        '{{- "<tool_call>\\n<function=example>\\n<parameter=p>" }}{%- set call = {"name": name, "arguments": given} %}',
        "Qwen3MoeForCausalLM",
        "qwen3_coder",
    ),
    ("{{- '<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>\\n' }}{{ tc.arguments }}", "glm4_moe", None),
    ("{{ '<seed:tool_call>\\n<function=' + name + '>\\n<parameter=' }}", "seed_oss", None),
    ("{{- '[TOOL_CALLS] [' }}{{- call.function | tojson }}{{- ']' }}", "MistralForCausalLM", "mistral"),
    ("{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", "ministral3", "mistral"),
    ('{{- \'<tool_call>\\n{"name": <name>, "arguments": <arguments>}\' }}', "MistralForCausalLM", "hermes"),
    ("{{- '<tool_call>\\n{\"arguments\": ' }} {{- '[TOOL_CALLS]' }}", "MistralForCausalLM", "mistral"),
    ("{{- '<tool_call>\\n{\"arguments\": ' }} {{- '[TOOL_CALLS]' }}", "Qwen3ForCausalLM", "hermes"),
    (
        '{{- \'Respond with {"name": function name, "parameters": dictionary of argument name and its value}.\' }}',
        "LlamaForCausalLM",
        "llama",
    ),
    ("{{ '<|python_tag|>' + code }}{{ '<function=' + name + '>' + arguments + '</function>' }}", "LlamaForCausalLM", None),
    (
        '{{- "in the form [func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]" }}',
        "LlamaForCausalLM",
        "pythonic",
    ),
    ('{{- "Use exact format: [func_name1(param1=value1), func_name2(...)]" }}', "Llama4ForConditionalGeneration", "pythonic"),
    ("{{ '[' }}{{- '{\"name\": \"' + call.name + '\", \"arguments\": ' }}", "LlamaForCausalLM", None),
    ("{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + type }}", "LlamaForCausalLM", None),
]


@pytest.mark.parametrize(("template", "architecture", "expected"), TEMPLATES)
def test_the_family_of_a_template(template, architecture, expected):
    assert family_of(template, architecture) == expected


def test_a_forced_call():
    check_tools(TOOLS, "required")
    one = forced_schema("hermes", TOOLS, "now")
    assert one == {
        "type": "object",
        "properties": {"name": {"const": "now"}, "arguments": {"type": "object", "properties": {}}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    any_ = forced_schema("llama", TOOLS)
    assert [each["properties"]["name"]["const"] for each in any_["anyOf"]] == [each["function"]["name"] for each in TOOLS]
    assert any_["anyOf"][0]["properties"]["parameters"] == TOOLS[0]["function"]["parameters"]
    assert forced_schema("hermes", TOOLS[2:3]) == one
    for format in FORMATS:
        key = FORMATS[format].key
        (call,) = forced_calls(f' {{"name": "get_weather",\n "{key}": {{"city": "Rome"}}}}\n', format, TOOLS)
        assert (call.index, call.name, call.arguments) == (0, "get_weather", '{"city": "Rome"}')
        assert call.id != forced_calls('{"name": "now"}', format, TOOLS)[0].id
        for text in [
            "",
            "so",
            '{"name": "get_weather", "argu',
            '{"name": "later", "arguments": {}}',
            '{"arguments": {}}',
            "[]",
            '{"name": "now"} {}',
        ]:
            assert forced_calls(text, format, TOOLS) == []


REFERRING = tool(
    "plan",
    {
        "first": {"$ref": "#/$defs/step"},
        "same": {"$ref": "#/properties/first"},
        "$ref": {"enum": ["#/a", {"$ref": "#/a"}]},
    },
    required=["first"],
    additionalProperties=False,
    **{
        "$defs": {
            "step": {
                "type": "object",
                "properties": {"what": {"type": "string"}, "then": {"$ref": "#/$defs/step"}},
                "required": ["what"],
                "additionalProperties": False,
            }
        }
    },
)
GOOD = '{"name": "plan", "arguments": {"first": {"what": "a", "then": {"what": "b"}}, "same": {"what": "c"}, "$ref": {"$ref": "#/a"}}}'
WRONG = [
    '{"name": "plan", "arguments": {"first": {"what": "a", "then": {"what": 1}}}}',
    '{"name": "plan", "arguments": {"first": {"what": "a"}, "same": 1}}',
    '{"name": "plan", "arguments": {"first": {"what": "a"}, "$ref": "b"}}',
    '{"name": "plan", "arguments": {}}',
    '{"name": "plant", "arguments": {"first": {"what": "a"}}}',
    '{"name": "get_weather", "arguments": {"first": {"what": "a"}}}',
    '{"name": "plan"}',
]
FORCED = [([REFERRING], None), ([*TOOLS, REFERRING], None), ([*TOOLS, REFERRING], "plan")]


@pytest.mark.parametrize(("tools", "name"), FORCED)
def test_a_forced_call_by_jsonschema(tools, name):
    jsonschema = pytest.importorskip("jsonschema")
    schema = forced_schema("hermes", tools, name)
    before = json.dumps(tools)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid(json.loads(GOOD))
    assert not any(validator.is_valid(json.loads(text)) for text in WRONG)
    assert validator.is_valid({"name": "now", "arguments": {}}) == (len(tools) > 1 and name is None)
    assert json.dumps(tools) == before


@pytest.mark.parametrize(("tools", "name"), FORCED)
def test_a_forced_call_by_llguidance(tools, name):
    llguidance = pytest.importorskip("llguidance")
    tokens = llguidance.LLTokenizer("byte")
    schema = forced_schema("hermes", tools, name)
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    wrong, why = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, tokens)
    assert not wrong, why

    def follows(text):
        matcher = llguidance.LLMatcher(tokens, grammar, log_level=0)
        return matcher.try_consume_tokens(tokens.tokenize_str(text)) == len(tokens.tokenize_str(text)) and matcher.is_accepting()

    assert follows(GOOD)
    assert not any(follows(text) for text in WRONG)
    (call,) = forced_calls(GOOD, "hermes", tools)
    assert json.loads(call.arguments) == json.loads(GOOD)["arguments"]


def function(**fields):
    return [{"type": "function", "function": {"name": "f", **fields}}]


DEEP = {"type": "object", "properties": {}}
for _ in range(60):
    DEEP = {"type": "object", "properties": {"x": DEEP}}


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ({}, None, "tools: it is a dict; give a list of tools"),
        (["f"], None, r"tools\[0\]: it is no function; write \{"),
        ([{"type": "web_search"}], None, r"tools\[0\]: it is no function; write \{"),
        ([{"type": "function", "name": "f"}], None, r"tools\[0\]: it is no function; write \{"),
        (function(name=None), None, r"tools\[0\]\.function\.name: None is no name; give 1 to 64 letters"),
        (function(name=""), None, r"tools\[0\]\.function\.name: '' is no name"),
        (function(name="a.b"), None, r"tools\[0\]\.function\.name: 'a.b' is no name"),
        (function(name="f\n"), None, r"is no name"),
        (function(name="a" * 65), None, r"is no name"),
        (function() + function(), None, r"tools\[1\]\.function\.name: 'f' is the name of tools\[0\] too; rename one of them"),
        (function(parameters=[]), None, r"tools\[0\]\.function\.parameters: it is no JSON schema of an object; write \{"),
        (function(parameters={"type": "string"}), None, "it is no JSON schema of an object"),
        (function(parameters={"anyOf": []}), None, "it is no JSON schema of an object"),
        (function(parameters={"type": "object", "properties": []}), None, r"parameters\.properties: it is a list; give an object"),
        (function(parameters={"properties": {"x": "string"}}), None, r"parameters\.properties\.x: it is a str; give a JSON schema"),
        (function(parameters=DEEP), None, "it is nested more than 100 levels deep; give a flatter schema"),
        (function(), "any", "tool_choice: 'any' is neither none, auto, required nor a function; name one as"),
        (function(), {"type": "function"}, "is neither none, auto, required nor a function"),
        (function(), {"type": "allowed_tools", "allowed_tools": {}}, "is neither none, auto, required nor a function"),
        (function(), {"type": "function", "function": {"name": "ff"}}, "there is no function 'ff' in tools; did you mean 'f'"),
        (None, "auto", "tool_choice: there are no tools to choose from; give tools, or leave it out"),
        ([], "required", "there are no tools to choose from"),
        (None, {"type": "function", "function": {"name": "f"}}, "there are no tools to choose from"),
    ],
)
def test_tools_that_are_wrong(tools, choice, message):
    with pytest.raises(UserError, match=message):
        check_tools(tools, choice)


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        (None, None),
        ([], "none"),
        (None, "none"),
        (function(), None),
        (function(parameters=None, strict=True, description="d"), "auto"),
        (function(parameters={}), "required"),
        (function(parameters={"properties": {"x": True}}, name="a" * 64), "none"),
        (TOOLS, {"type": "function", "function": {"name": "get-time"}}),
        ([REFERRING], "required"),
    ],
)
def test_tools_that_are_right(tools, choice):
    check_tools(tools, choice)


@pytest.mark.parametrize(("format", "model"), [("hermes", "qwen3"), ("qwen3_coder", "qwen3_5")])
def test_as_transformers_reads_it(format, model):
    """What the server of transformers knows of these models' answers."""
    parsing = pytest.importorskip("transformers.utils.chat_parsing")
    serving = pytest.importorskip("transformers.cli.serving.utils")
    template = next(each for models, each in serving._RESPONSE_TEMPLATE_FALLBACKS.items() if model in models)
    compared = 0
    for name, text, content, calls in SAMPLES:
        # It wants the closing tag, takes the first one even where it stands in a string, and strips values.
        if name != format or not text.strip().endswith("</tool_call>") or text.count("<tool_call>") != len(calls):
            continue
        if '"{}"' in text or "\n\n</parameter>" in text:
            continue
        found = parsing.parse_response(text + "<|im_end|>", template, prefix="<|im_start|>assistant\n", tools=TOOLS)
        theirs = [(call["function"]["name"], call["function"]["arguments"]) for call in found["tool_calls"]]
        assert (found.get("content", ""), theirs) == (content, calls)
        compared += 1
    assert compared == {"hermes": 3, "qwen3_coder": 1}[format]


def test_the_http_process_needs_no_torch():
    code = "import sys, fw.server.tool_calls; sys.exit(any(name in sys.modules for name in ('torch', 'fastapi', 'pydantic')))"
    subprocess.run(["env", sys.executable, "-c", code], check=True)  # by another program: tests start Python with torch imported
