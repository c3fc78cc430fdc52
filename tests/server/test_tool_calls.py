import json
import re
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from fw.errors import UserError
from fw.server import tool_formats
from fw.server.tool_calls import Content, ToolCalls
from fw.server.tool_formats import FORMATS
from server.tool_samples import BROKEN, NOW, SAMPLES, TOOLS, pushed, told


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
