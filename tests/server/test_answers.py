"""What completions say of their answers, streamed and whole, and what is counted of them."""

from __future__ import annotations

import json
import socket

import pytest

import fw
from serving import serving

ASKED = {"max_tokens": 12, "temperature": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def llm(directory):
    return fw.LLM(directory, dtype="fp32")


@pytest.fixture(scope="module")
def client(server):
    with server.client() as made:
        yield made


def _whole(client, path="/v1/completions", **body):
    found = client.post(path, json=body)
    assert found.status_code == 200, found.text
    return found.json()


def _streamed(client, **body):
    """Choices put together, and the usage."""
    text = client.post("/v1/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}).text
    *events, done, empty = text.split("\n\n")
    assert (done, empty) == ("data: [DONE]", "")
    choices, usage = {}, None
    for each in (json.loads(line.removeprefix("data: ")) for line in events):
        usage = each["usage"] or usage
        for piece in each["choices"]:
            one = choices.setdefault(piece["index"], {"text": "", "finish_reason": None, "logprobs": {}})
            one["text"] += piece["text"]
            one["finish_reason"] = piece["finish_reason"] or one["finish_reason"]
            for name, values in (piece["logprobs"] or {}).items():
                one["logprobs"].setdefault(name, []).extend(values or [])
    return [choices[index] for index in sorted(choices)], usage


def _metrics(client):
    from prometheus_client.parser import text_string_to_metric_families

    families = text_string_to_metric_families(client.get("/metrics").text)
    return {one.name: one.value for each in families for one in each.samples if not {"le", "finished_reason"} & one.labels.keys()}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("more", [{}, {"echo": True}, {"n": 2}, {"best_of": 3}], ids=str)
def test_offsets_are_those_of_the_whole_text(client, seed, more):
    """Random bytes, so that characters are of several tokens, or broken."""
    asked = {"prompt": "é is", "max_tokens": 60, "temperature": 1.0, "seed": seed, "logprobs": 2, "ignore_eos": True, **more}
    whole = _whole(client, **asked)
    streamed, usage = _streamed(client, **asked)
    assert usage == whole["usage"] and len(streamed) == len(whole["choices"])
    for one, other in zip(whole["choices"], streamed, strict=True):
        assert other["text"] == one["text"] and other["finish_reason"] == one["finish_reason"]
        for name in ("tokens", "text_offset"):
            assert other["logprobs"][name] == one["logprobs"][name]
        offsets = one["logprobs"]["text_offset"]
        assert offsets[0] == 0 and offsets == sorted(offsets) and offsets[-1] <= len(one["text"])
        for token, at in zip(one["logprobs"]["tokens"], offsets, strict=True):  # of those that are a text by themselves
            assert token.startswith(("bytes:", "<")) or "\ufffd" in one["text"] or one["text"][at:].startswith(token)


@pytest.mark.parametrize("prompt", ["é is", [[104, 105], [120]]], ids=["text", "ids"])
def test_the_prompt_is_repeated_in_streams_too(client, llm, prompt):
    asked = {**ASKED, "prompt": prompt, "echo": True}
    whole = _whole(client, **asked)["choices"]
    assert [one["text"] for one in _streamed(client, **asked)[0]] == [one["text"] for one in whole]
    prompts = [prompt] if isinstance(prompt, str) else [llm.tokenizer.decode(ids) for ids in prompt]
    alone = [one["text"] for one in _whole(client, **{**asked, "echo": False})["choices"]]
    assert [one["text"] for one in whole] == [before + after for before, after in zip(prompts, alone, strict=True)]
    none = _streamed(client, **{**asked, "max_tokens": 0})[0]
    assert [(one["text"], one["finish_reason"]) for one in none] == [(before, "length") for before in prompts]


def test_the_best_of_several(client, llm):
    """By hand: of five that are drawn the two of the largest mean log-probability; all five are counted, and the prompt once."""
    asked = {"prompt": "once", "max_tokens": 10, "seed": 5, "temperature": 1.0, "ignore_eos": True}
    (drawn,) = llm.generate("once", n=5, logprobs=0, **{key: value for key, value in asked.items() if key != "prompt"})
    best = sorted(drawn.completions, key=lambda each: -sum(each.logprobs) / len(each.logprobs))[:2]
    whole = _whole(client, **asked, best_of=5, n=2)
    streamed, usage = _streamed(client, **asked, best_of=5, n=2)
    for found in (whole["choices"], streamed):
        assert [one["text"] for one in found] == [each.text for each in best]
    for used in (whole["usage"], usage):
        assert (used["prompt_tokens"], used["completion_tokens"], used["total_tokens"]) == (len(drawn.prompt_token_ids), 50, 54)


def test_no_end_before_the_least_tokens(client, llm):
    """With the end made certain, and a text and an id that end it besides."""
    (end,) = llm.engine.ends
    asked = {"prompt": "once", "max_tokens": 30, "temperature": 0, "logit_bias": {str(end): 100}}
    assert _whole(client, **asked)["usage"]["completion_tokens"] == 1
    for more in ({}, {"stop": ["e"]}, {"stop_token_ids": [100, 101]}):
        found = _whole(client, **asked, min_tokens=9, **more)
        assert found["usage"]["completion_tokens"] == 10 and found["choices"][0]["finish_reason"] == "stop"
    assert client.post("/v1/completions", json={**asked, "min_tokens": 31}).status_code == 400


@pytest.mark.parametrize(
    "body, why",
    [
        ({"logit_bias": {str(token % 250): 1.0 for token in range(3)} | {f"{'0' * (n + 1)}9": 1.0 for n in range(3)}}, None),
        ({"logit_bias": {str(token): 1.0 for token in range(1025)}}, "logit_bias: 1025 are more than the 1024"),
        ({"stop_token_ids": [5] * 129}, "stop_token_ids: 129 are more than the 128"),
        ({"stop": ["x" * 257]}, "stop: a text of 257 characters"),
        ({"stop": ["x" * 256] * 64, "stop_token_ids": [5] * 128}, None),
    ],
    ids=["few biases", "biases", "ids", "a long text", "as much as there may be"],
)
def test_wishes_are_bounded(client, body, why):
    for path, given in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        found = client.post(path, json={"max_tokens": 2, **given, **body})
        assert found.status_code == (400 if why else 200), found.text
        if why:
            assert found.json()["error"]["message"].startswith(why)


def test_tokens_are_timed_by_answer(server, client):
    before = _metrics(client)
    _whole(client, prompt="x", n=2, max_tokens=5, temperature=0, ignore_eos=True)
    _streamed(client, prompt="y", n=3, max_tokens=5, seed=1, ignore_eos=True)
    after = _metrics(client)

    def more(name):
        return after[name] - before.get(name, 0)

    assert more("vllm:time_to_first_token_seconds_count") == 2, "a request has one"
    assert more("vllm:inter_token_latency_seconds_count") == (2 + 3) * 4
    assert 0 < more("vllm:time_to_first_token_seconds_sum") <= more("vllm:e2e_request_latency_seconds_sum")
    assert more("vllm:request_generation_tokens_sum") == 25


def test_what_never_fits_is_refused_for_good_and_what_is_full_is_counted(directory):
    with (
        serving(directory, "inference.max_sequences=2", "--max-queue", "1", "serve.max_prompt_tokens=9") as server,
        server.client() as client,
    ):
        asked = {"max_tokens": 1, "temperature": 1.0, "seed": 1}
        for body, why in (
            ({"prompt": ["x", "y"], "n": 2}, "4 sequences"),
            ({"prompt": "x", "n": 3}, "3 answers are more than this server computes at once, 2"),
            ({"prompt": "x", "best_of": 3}, "3 answers"),
            ({"prompt": "x" * 10}, "10 tokens"),
        ):
            found = client.post("/v1/completions", json={**asked, **body})
            assert found.status_code == 400 and why in found.json()["error"]["message"], found.text
        assert _whole(client, **asked, prompt="x" * 9)["usage"]["prompt_tokens"] == 9
        assert _metrics(client)["fw:requests_rejected_total"] == 0
        busy = {"prompt": ["x", "y", "z"], "max_tokens": 1900, "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=busy) as held:
            lines = held.iter_lines()
            next(lines)
            with server.client() as other:
                assert other.post("/v1/completions", json={**asked, "prompt": "x"}).status_code == 429
                assert _metrics(other)["fw:requests_rejected_total"] == 1
        server.idle()
        assert server.stats()["rejected_total"] == 1


def test_sequences_that_make_room_for_others_are_counted(directory, llm):
    """Three of 300 tokens, where there is room for 512."""
    room = int(llm.engine.reads.token_bytes * 512)
    prompts = [str(n) * 100 for n in range(3)]
    asked = {"max_tokens": 200, "temperature": 0, "ignore_eos": True}
    expected = [result.text for result in llm.generate(prompts, **asked)]
    words = ("inference.dtype=fp32", "inference.max_context=400", f"inference.kv_budget={room}B")
    with serving(directory, *words) as server, server.client() as client:
        assert _metrics(client)["vllm:num_preemptions_total"] == 0
        assert [one["text"] for one in _whole(client, prompt=prompts, **asked)["choices"]] == expected
        assert _metrics(client)["vllm:num_preemptions_total"] == server.idle()["preemptions_total"] > 0


def test_more_than_sockets_hold_waits_for_who_reads_slowly(server, client):
    """Twice what the kernel keeps of it at most, or more: the engine is done with it long before it is read, and others are answered."""
    body = json.dumps({"prompt": "x", "n": 8, "max_tokens": 1900, "seed": 1, "logprobs": 20, "ignore_eos": True, "stream": True}).encode()
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # before it is connected, or it has no effect on what is promised
        sock.settimeout(60)
        sock.connect((host, int(port)))
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Request-Id: slow\r\n"
        sock.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        server.idle()  # or it has not begun yet
        begun = sock.recv(1)
        server.idle()
        for n in range(3):
            assert _whole(client, prompt=f"n{n}", max_tokens=5, temperature=0, ignore_eos=True)["usage"]["completion_tokens"] == 5
        assert not [line for line in server.log if line.get("id") == "slow"], "it has not been read"
        answer = begun + b"".join(iter(lambda: sock.recv(1 << 20), b""))
    assert len(answer) > 8 << 20 and answer.count(b'"finish_reason":"length"') == 8 and b"[DONE]" in answer[-100:]
