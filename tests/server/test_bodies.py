"""Bodies that are refused before anything of them is understood, or without a word for each thing that is wrong."""

from __future__ import annotations

import json
import random

import pytest
from pydantic import ValidationError

from fw.server.bodies import MOST_CONTAINERS, MOST_DEPTH, MOST_MEMBERS, MOST_VALUES, check_shape, check_shapes, parse
from fw.server.errors import ApiError
from fw.server.response_schemas import ResponseRequest
from fw.server.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, EmbeddingRequest

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "x"}]
STRINGS = ["", "[", "]]", "{", "}", '"', "\\", '\\"[', "[" * 200, "a\\\\", "é☃😀"]


def _nested(depth):
    return "[" * depth + "]" * depth


def _made(draw, depth):
    """A value with brackets within strings, too."""
    kind = draw.randrange(4 if depth else 2)
    if kind == 0:
        return draw.choice(STRINGS)
    if kind == 1:
        return draw.choice([1, -2.5, True, None])
    size = draw.randrange(1, 4)
    if kind == 2:
        return [_made(draw, depth - 1) for _ in range(size)]
    return {draw.choice(STRINGS) + str(n): _made(draw, depth - 1) for n in range(size)}


def _depth(value):
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_within_bounds_is_read_as_python_reads_it(seed):
    draw = random.Random(seed)
    for more in (0, 60, 95, 99, 100, 101, 130):
        value = _made(draw, 6)
        for _ in range(more):
            value = [draw.choice(STRINGS), value] if draw.random() < 0.5 else {draw.choice(STRINGS): value}
        body = json.dumps(value, ensure_ascii=draw.random() < 0.5).encode()
        if _depth(value) > MOST_DEPTH:
            with pytest.raises(ApiError, match="deep"):
                parse(body)
        else:
            assert parse(body) == json.loads(body)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (_nested(MOST_DEPTH + 1), "more than 100 lists and objects deep"),
        (_nested(10**6), "more than 100,000 lists and objects"),
        ("[" + "{}," * MOST_CONTAINERS + "1]", "more than 100,000 lists and objects"),
        ("{" + ",".join(f'"{n}":0' for n in range(MOST_MEMBERS + 1)) + "}", "more than 10,000 members"),
        ("[" + "1," * MOST_VALUES + "1]", "more than 500,000 values"),
        ("[" + '"",' * MOST_VALUES + "1]", "more than 500,000 values"),
        ("[" + r'"\\",' * 4 * MOST_VALUES + "1]", "more than 500,000 values"),
        ('{"a": NaN}', "NaN"),
        ('{"a": [-Infinity]}', "-Infinity"),
        ('{"a": 1e400}', "beyond all bounds"),
        ('{"a": ' + "1" * 5000 + "}", "too many digits"),
        (r'{"a": "\ud800"}', "half of a surrogate pair"),
        (r'{"a": {"x\uDFFFy": 1}}', "half of a surrogate pair"),
        ('"é"'.encode("latin-1"), "no UTF-8 at byte 1"),
        ('{"a": 1}'.encode("utf-16"), "no UTF-8"),
        (b'"\xed\xa0\x80"', "no UTF-8"),
    ],
)
def test_what_is_beyond_bounds_is_refused(body, why):
    with pytest.raises(ApiError, match=why) as found:
        parse(body if isinstance(body, bytes) else body.encode())
    assert found.value.status == 400 and found.value.code == "invalid_json"


def test_what_is_no_json_is_no_more_than_that():
    """However many brackets there are of which nobody knows whether they are in a string."""
    for body in ('"' + '\\"[' * 10**5, "]" * 10**5 + "[" * 50, '{"a": }', ""):
        with pytest.raises(json.JSONDecodeError):
            parse(body.encode())
    assert parse(rb'"\ud83d\ude00 \\ud800"') == "😀 \\ud800"
    check_shape(b'"' + b"[" * 10**6 + b'"')


def test_as_many_values_as_may_be_are_read():
    """Commas and quotation marks within strings are none."""
    ids = [7] * MOST_VALUES
    assert parse(json.dumps(ids).encode()) == ids
    for text in ("," * 2 * MOST_VALUES, '",' * 5 * MOST_VALUES):
        assert parse(json.dumps([text, 1]).encode()) == [text, 1]


@pytest.mark.parametrize(("body", "why"), [(b"[" + b"7," * 300_000 + b"7]", "500,000 values"), (b"[]" * 60_000, "100,000 lists")])
def test_what_several_bring_is_counted_together(body, why):
    check_shapes([body])
    check_shapes([body, b'"' + body + b'"', b"[]"])  # in a string it is text
    with pytest.raises(ApiError, match=why):
        check_shapes([body, b"{}", body])


def test_arguments_of_all_calls_are_counted_together(server):
    """They are read one after another, while nobody else's answer goes on."""
    many = json.dumps([0] * 300_000)
    calls = [{"id": f"{n}", "type": "function", "function": {"name": "f", "arguments": many}} for n in range(2)]
    with server.client() as client:
        found = client.post(CHAT, json={"messages": [*HELLO, {"role": "assistant", "tool_calls": calls}], "max_tokens": 1})
    assert found.status_code == 400 and "500,000 values" in found.json()["error"]["message"]


@pytest.mark.parametrize(
    ("kind", "body", "most"),
    [
        (CompletionRequest, {"prompt": [None] * 10**5}, 4),
        (CompletionRequest, {"prompt": [[None] * 10] * 10**4}, 4),
        (CompletionRequest, {"prompt": ["x"] * 10**5 + [1]}, 4),
        (CompletionRequest, {"prompt": "x", "stop": [1] * 10**5}, 2),
        (CompletionRequest, {"prompt": "x", "stop_token_ids": ["x"] * 10**5}, 1),
        (CompletionRequest, {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(10**4)), "x")}, 1),
        (CompletionRequest, {"prompt": "x", "metadata": dict.fromkeys(map(str, range(10**4)), 1)}, 1),
        (EmbeddingRequest, {"input": [{}] * 10**5}, 4),
        (DetokenizeRequest, {"tokens": ["x"] * 10**5}, 1),
        (ChatRequest, {"messages": [1] * 10**5}, 1),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 10**5}] * 10}, 2),
        (ChatRequest, {"messages": [{"role": "user", "tool_calls": [1] * 10**5}]}, 1),
        (ChatRequest, {"messages": HELLO, "tools": [1] * 10**5}, 1),
        (ResponseRequest, {"input": [1] * 10**5}, 1),
        (ResponseRequest, {"input": [{"role": "user", "content": [1] * 10**5}]}, 1),
        (ResponseRequest, {"input": "x", "tools": [1] * 10**5}, 1),
        (ResponseRequest, {"input": "x", "include": ["x"] * 10**5}, 1),
    ],
)
def test_many_wrong_items_are_one_mistake(kind, body, most):
    with pytest.raises(ValidationError) as found:
        kind.model_validate(body)
    assert found.value.error_count() <= most


def _deep(depth, inner=None):
    value = {"type": "string"} if inner is None else inner
    for _ in range(depth):
        value = {"type": "object", "properties": {"a": value}}
    return value


@pytest.mark.parametrize(
    "more",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _deep(250)}}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": _deep(250)}}], "tool_choice": "required"},
        {"chat_template_kwargs": {"a": _deep(250)}},
        {"messages": [{"role": "user", "content": "x", "more": _deep(250)}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": _nested(5000)}}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": _deep(250)}}]}]},
    ],
)
def test_what_is_too_deep_for_those_who_read_it_reaches_none_of_them(server, more):
    with server.client() as client:
        found = client.post(CHAT, json={"messages": HELLO, "max_tokens": 1, **more})
        assert found.status_code == 400 and "deep" in found.json()["error"]["message"]
        assert client.post(CHAT, json={"messages": HELLO, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    "wrong", [r'"\ud800"', "1e400", "1" + "0" * 400, "NaN", "null", '""', r'"\u0000"', "[]", "{}", "[[]]", '{"": null}']
)
def test_nothing_that_is_asked_is_a_failure_of_the_server(server, wrong):
    schemas = server.client().get("/openapi.json").json()["components"]["schemas"]
    base = {
        ("/v1/completions", "CompletionRequest"): {"prompt": "x", "max_tokens": 1},
        (CHAT, "ChatRequest"): {"messages": HELLO, "max_tokens": 1},
        ("/v1/responses", "ResponseRequest"): {"input": "x", "max_output_tokens": 1},
        ("/v1/embeddings", "EmbeddingRequest"): {"input": "x"},
        ("/tokenize", "TokenizeRequest"): {"prompt": "x"},
        ("/detokenize", "DetokenizeRequest"): {"tokens": [5]},
    }
    headers = {"Content-Type": "application/json"}
    call = '{"role": "assistant", "tool_calls": [{"function": {"name": WRONG, "arguments": {"a": WRONG}}}]}'.replace("WRONG", wrong)
    part = f'{{"role": "user", "content": [{{"type": "text", "text": {wrong}}}]}}'
    with server.client() as client:
        for (path, schema), body in base.items():
            for name in [*schemas[schema]["properties"], "unknown"]:
                rest = json.dumps({key: value for key, value in body.items() if key != name})
                asked = f'{rest[:-1]}{", " if rest != "{}" else ""}"{name}": {wrong}}}'
                found = client.post(path, content=asked, headers=headers)
                assert found.status_code < 500 and (found.status_code == 200 or found.json()["error"]["message"]), asked
        for message in (call, part):
            asked = f'{{"messages": [{message}], "max_tokens": 1}}'
            assert client.post(CHAT, content=asked, headers=headers).status_code < 500, asked


def test_messages_repeat_no_more_than_is_read(server):
    long = "x" * 10**5
    with server.client() as client:
        for path, body in (
            ("/v1/completions", {"prompt": "x", "model": long}),
            ("/v1/completions", {"prompt": "x", long: 1}),
            (CHAT, {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": long}}}]}),
            ("/v1/unload_lora_adapter", {"lora_name": long}),
        ):
            found = client.post(path, json=body)
            assert 400 <= found.status_code < 500 and len(found.text) < 2000
            assert set(found.json()["error"]) == {"message", "type", "param", "code"}
        assert len(client.get(f"/{long[:30000]}").text) < 2000
