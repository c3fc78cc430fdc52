"""Answers that are large: bounded, and made beside the event loop, where they are what small ones are."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from fw.inference.results import Completion, Result
from fw.server import large
from fw.server.completions import _check_echo
from fw.server.errors import ApiError

ODD = {"text": 'é "\\ \u2028 😀', "none": None, "of": [], "in": {}, "many": [[[1.5, 2], {"a": [{}]}]] * 3, "yes": True}
TOP = {"x": -0.5, "bytes:\\xff": -1e-9}


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        "x",
        ODD,
        [ODD] * 250,
        list(range(1001)),
        {"choices": [{"index": n, "logprobs": {"tokens": ["x"] * 300, "top_logprobs": [None, *[TOP] * 299]}} for n in range(3)]},
        {"data": [{"embedding": [0.25] * 500, "index": n} for n in range(120)]},
        {"content": [{"token": "x", "bytes": [120], "top_logprobs": [{"token": "y", "bytes": [121]}] * 20}] * 205},
        {f"key {n}": [n] * (n % 130) for n in range(300)},
    ],
)
def test_json_in_pieces_is_json(value):
    compact = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert large.written(value).decode() == compact
    assert json.loads(large.written(value, json.JSONEncoder().encode)) == value


def test_no_piece_is_large():
    encoded = []
    value = {"choices": [{"logprobs": {"top_logprobs": [TOP] * 5000, "text_offset": list(range(5000))}}] * 2}
    large.written(value, lambda each: encoded.append(len(json.dumps(each))) or json.dumps(each))
    assert max(encoded) <= 100 * (len(json.dumps(TOP)) + 2)


def _result(tokens, top):
    return Result(
        "key", [1] * tokens, [Completion(0, "", [1], [0.0], [], "stop")], [0.0] * tokens, [dict.fromkeys(range(top), 0.0)] * tokens, 0
    )


@pytest.mark.parametrize(("results", "beside"), [([_result(200, 20)], False), ([_result(200, 20)] * 2, True), ([_result(5001, 0)], True)])
def test_a_large_body_is_made_in_a_thread(results, beside):
    threads = []

    def whole(found):
        threads.append(threading.current_thread())
        return {"size": len(found)}

    response = asyncio.run(large.response(whole, results))
    assert json.loads(response.body) == {"size": len(results)} and response.headers["content-type"] == "application/json"
    assert (threads[0] is not threading.current_thread()) == beside


def test_what_is_told_of_prompts_is_bounded():
    _check_echo(49_932, 20, 1)
    _check_echo(1 << 19, 1, 1)
    for tokens, logprobs, answers, says in (
        (49_933, 20, 1, "with 21 log-pr"),
        ((1 << 18) + 1, 1, 2, "2 log-probabilities in each of 2 answers"),
    ):
        with pytest.raises(ApiError, match=f"logprobs: {tokens} tokens of prompts .* {says}") as found:
            _check_echo(tokens, logprobs, answers)
        assert found.value.status == 400


def test_a_large_answer_is_what_small_ones_are(server):
    prompt, more = list(range(3, 103)), {"max_tokens": 2, "temperature": 0, "logprobs": 20, "echo": True}
    with server.client() as client:
        refused = client.post("/v1/completions", json={"prompt": [prompt * 20] * 26, **more})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "logprobs"
        (alone,) = client.post("/v1/completions", json={"prompt": prompt, **more}).json()["choices"]
        for stream in (False, True):
            found = client.post("/v1/completions", json={"prompt": [prompt] * 3, "stream": stream, **more})
            if stream:
                events = [json.loads(line.removeprefix("data: ")) for line in found.text.split("\n\n")[:-2]]
                choices = sorted((each["choices"][0] for each in events), key=lambda each: each["index"])
            else:
                choices = found.json()["choices"]
            assert [each["index"] for each in choices] == [0, 1, 2]
            for each in choices:
                assert (each["text"], each["finish_reason"]) == (alone["text"], "length")
                for name in ("tokens", "text_offset"):
                    assert each["logprobs"][name] == alone["logprobs"][name]
                assert each["logprobs"]["token_logprobs"][1:] == pytest.approx(alone["logprobs"]["token_logprobs"][1:], abs=1e-4)
                assert len(each["logprobs"]["top_logprobs"]) == len(alone["logprobs"]["top_logprobs"]) == 102
