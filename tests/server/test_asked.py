"""What is taken, refused and said as OpenAI's interface has it: options, numbers of inputs, long texts, and fields that are null."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest

from fw.server.chat import _tools
from fw.server.errors import ApiError
from fw.server.schemas import ChatRequest
from fw.server.tokens import LONG, decode, encode_all
from serving import KEY, serving

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "x"}]
OF = {"/v1/completions": {"prompt": "x"}, CHAT: {"messages": HELLO}, "/v1/responses": {"input": "x"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        *((path, {"stream_options": {}}, "stream_options") for path in OF),
        *((path, {"stream_options": {}, "stream": False}, "stream_options") for path in OF),
        *((path, {"stream_options": {"include_obfuscation": True}, "stream": True}, "stream_options.include_obfuscation") for path in OF),
        *((path, {"service_tier": "priority"}, "service_tier") for path in OF),
        (CHAT, {"store": True}, "store"),
        ("/v1/responses", {"store": True}, "store"),
        (CHAT, {"regex": "x" * 100_001}, "regex"),
        (CHAT, {"tools": [TOOL] * 129}, "tools"),
        ("/tokenize", {"messages": HELLO, "tools": [TOOL] * 129}, "tools"),
        ("/v1/responses", {"tools": [{"type": "function", "name": "f"}] * 129}, "tools"),
    ],
)
def test_what_would_have_no_effect_is_refused(server, path, more, param):
    with server.client() as client:
        found = client.post(path, json={**OF.get(path, {}), **more})
        assert found.status_code == 400 and found.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "more", "param", "says"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages.0.content.0.text", "valid string"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type", "should be 'text'"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "valid string"),
        (CHAT, {"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name", "Missing required parameter"),
        (CHAT, {"tool_choice": "maybe"}, "tool_choice", "'none', 'auto' or 'required'"),
        (CHAT, {"stop": [1]}, "stop.0", "valid string"),
        (CHAT, {"stop": "x", "n": "many", "seed": "x"}, "n", "valid integer"),
        ("/v1/completions", {"prompt": [[1, "x"]]}, "prompt.0.1", "valid integer"),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]},
            "input.0.content.0.text",
            "valid str",
        ),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name", "Missing required parameter"),
    ],
)
def test_what_is_wrong_is_named_by_the_clients_words(server, path, more, param, says):
    """Of what may have several forms, by the one that it comes nearest to."""
    with server.client() as client:
        found = client.post(path, json={**OF[path], **more})
    error = found.json()["error"]
    assert (found.status_code, error["param"]) == (400, param) and says in error["message"] and param in error["message"]


def test_what_is_wrong_with_an_address_is_named(server):
    with server.client() as client:
        found = client.get("/v1/files", params={"limit": "many"})
        assert found.status_code == 400 and found.json()["error"]["param"] == "query.limit"
        found = client.post(CHAT, content="{", headers={"Content-Type": "application/json"})
        assert found.status_code == 400 and "the body is no JSON: " in found.json()["error"]["message"]


def test_what_is_so_anyway_is_taken(server):
    more = {"service_tier": "auto", "stream": True, "stream_options": {"include_obfuscation": False}}
    with server.client() as client:
        for path, body in OF.items():
            assert client.post(path, json={**body, **more, **({} if path == "/v1/completions" else {"store": False})}).status_code == 200


def test_calls_that_are_read_from_special_tokens_cannot_do_without():
    tokenizer = SimpleNamespace(token_to_id=lambda token: 5, special_ids={5})
    api = SimpleNamespace(tool_format="hermes", tokenizer=tokenizer)
    asked = {"messages": HELLO, "tools": [TOOL]}
    with pytest.raises(ApiError, match="skip_special_tokens"):
        _tools(api, ChatRequest(**asked, skip_special_tokens=True))
    assert _tools(api, ChatRequest(**asked))[1] == {"skip_special_tokens": False}
    tokenizer.special_ids = set()
    assert _tools(api, ChatRequest(**asked, skip_special_tokens=True))[1] == {}


def _chunks(client, path, **more):
    told = client.post(path, json={**OF[path], "max_tokens": 3, "ignore_eos": True, "stream": True, **more}).text
    return [json.loads(line.removeprefix("data: ")) for line in told.split("\n\n") if line and line != "data: [DONE]"]


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_pieces_have_a_usage_where_one_is_to_come(server, path):
    with server.client() as client:
        *pieces, last = _chunks(client, path, stream_options={"include_usage": True})
        assert pieces and all(each["usage"] is None for each in pieces) and last["usage"]["completion_tokens"] == 3
        assert all("usage" not in each for each in _chunks(client, path))


def test_messages_say_that_nothing_was_refused(server):
    with server.client() as client:
        asked = {"messages": HELLO, "max_tokens": 2}
        assert client.post(CHAT, json=asked).json()["choices"][0]["message"]["refusal"] is None
        first = _chunks(client, CHAT)[0]["choices"][0]["delta"]
        assert first["role"] == "assistant" and first["refusal"] is None


def test_many_texts_are_embedded_a_part_at_a_time(directory):
    """More of them than may ever wait; each as by itself."""
    with serving(directory, "inference.dtype=fp32", "inference.max_sequences=4", "--max-queue", "2") as server, server.client() as client:
        texts = [f"text {n}" for n in range(19)]
        found = client.post("/v1/embeddings", json={"input": texts}).json()
        assert [each["index"] for each in found["data"]] == list(range(19))
        for n in (0, 7, 18):
            (alone,) = client.post("/v1/embeddings", json={"input": texts[n]}).json()["data"]
            assert found["data"][n]["embedding"] == pytest.approx(alone["embedding"], abs=1e-5)
        assert found["usage"]["prompt_tokens"] == sum(map(len, texts))
        # Answers are all begun together; those that there is never room for are not to be tried again.
        refused = client.post("/v1/completions", json={"prompt": texts[:7], "max_tokens": 1})
        assert refused.status_code == 400 and "room for 6" in refused.json()["error"]["message"]
        assert client.post("/v1/completions", json={"prompt": texts[:6], "max_tokens": 1}).status_code == 200
        assert client.post("/v1/embeddings", json={"input": ["x"] * 2049}).status_code == 400
        server.idle()


def test_inputs_have_a_bound_of_their_own(directory):
    with serving(directory, "serve.max_inputs=3", "serve.max_n=1") as server, server.client() as client:
        assert client.post("/v1/embeddings", json={"input": ["x"] * 3}).status_code == 200
        assert client.post("/v1/completions", json={"prompt": ["x"] * 3, "max_tokens": 1}).status_code == 200
        for path, name in (("/v1/embeddings", "input"), ("/v1/completions", "prompt")):
            found = client.post(path, json={name: ["x"] * 4})
            assert found.status_code == 400 and found.json()["error"]["param"] == name
        assert client.post("/v1/completions", json={"prompt": "x", "n": 2}).status_code == 400


def test_texts_that_no_context_holds_are_not_even_encoded(server):
    """The longest token is spelled with 5 characters, the context has 2,048 tokens."""
    text = "x" * (2048 * 5 + 1)
    with server.client() as client:
        for path, body in (
            ("/v1/completions", {"prompt": text}),
            ("/v1/completions", {"prompt": ["x", text]}),
            ("/v1/embeddings", {"input": text}),
            ("/tokenize", {"prompt": text}),
            ("/tokenize", {"messages": [{"role": "user", "content": text}]}),
            (CHAT, {"messages": [{"role": "user", "content": text}]}),
        ):
            found = client.post(path, json=body)
            assert found.status_code == 400 and found.json()["error"]["code"] == "context_length_exceeded", path
            assert "10240 of 2048 of the longest token" in found.json()["error"]["message"]
        assert client.post("/tokenize", json={"prompt": text[:-1]}).json()["count"] == 10240


def test_long_texts_are_encoded_and_decoded_beside_the_event_loop():
    """As a batch, for which the tokenizers library lets others run meanwhile."""
    threads = {}

    def told(name, value):
        threads[name] = threading.current_thread()
        return value

    tokenizer = SimpleNamespace(
        encode_all=lambda texts, add_special_tokens: told("all", [[len(text)] for text in texts]),
        encode=lambda text, add_special_tokens: told("one", [len(text)]),
        decode=lambda ids: told("decode", "x" * len(ids)),
    )
    main = threading.current_thread()
    many = ["x" * n for n in (3, LONG, 1 << 20, 1 << 21, 1, 1 << 19, 1 << 19, 2)]
    assert asyncio.run(encode_all(tokenizer, many)) == [[len(text)] for text in many]
    assert asyncio.run(encode_all(tokenizer, ["x", "y" * LONG])) == [[1], [LONG]] and threads.pop("all") is not main
    assert asyncio.run(encode_all(tokenizer, ["x"] * (LONG + 1))) == [[1]] * (LONG + 1) and threads.pop("all") is not main
    assert asyncio.run(encode_all(tokenizer, ["x", "yy"])) == [[1], [2]] and threads == {"one": main}
    assert len(asyncio.run(decode(tokenizer, [1] * (LONG + 1)))) == LONG + 1 and threads["decode"] is not main
    assert asyncio.run(decode(tokenizer, [1])) == "x" and threads["decode"] is main


def test_what_is_too_large_has_its_code_whichever_way_it_comes(directory):
    with serving(directory, "serve.max_body=1KiB") as server, server.client() as client:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        for content in (b" " * 2000, iter([b" " * 600, b" " * 600])):
            found = client.post("/v1/completions", content=content, headers=headers)
            assert found.status_code == 413 and found.json()["error"]["code"] == "request_too_large"
