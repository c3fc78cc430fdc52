"""What the log's line of a request says, however many prompts it has, and however long a name."""

from __future__ import annotations

from fw.server.api import _note_first
from fw.server.logs import Record, current
from serving import serving, until


def test_a_line_of_several_prompts_tells_of_all(directory):
    asked = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
    with serving(directory, "inference.dtype=fp32", "serve.log_prompts=true") as server, server.client() as client:
        for stream in (False, True):
            body = {"prompt": ["once", "twice", "x"], "n": 2, "stream": stream, **asked}
            headers = {"X-Request-Id": f"stream-{stream}"}
            assert client.post("/v1/completions", json=body, headers=headers).status_code == 200
        client.post("/v1/embeddings", json={"input": ["once", "x"]}, headers={"X-Request-Id": "embedded"})
        found = until(lambda: len(all_of := _requests(server)) == 3 and all_of)
        lines = {line["id"]: line for line in found}
        for stream in (False, True):
            line = lines[f"stream-{stream}"]
            assert (line["prompt_tokens"], line["completion_tokens"]) == (10, 18) and line["finish_reasons"] == ["length"] * 6
            assert sorted(line["prompt"]) == ["once", "twice", "x"] and len(line["answers"]) == 6
        assert (lines["embedded"]["prompt_tokens"], lines["embedded"]["completion_tokens"]) == (5, 0)


def _requests(server):
    return [line for line in server.log if line["event"] == "request"]


def test_the_first_token_is_the_first_of_all():
    """Whichever prompt's answer it is of."""
    record = Record("id", "POST", "/")
    token = current.set(record)
    try:
        for seconds in (0.5, 0.7):
            _note_first(seconds)
        assert record.more == {"first_token_seconds": 0.5}
    finally:
        current.reset(token)


def test_a_name_is_not_repeated_at_any_length(server):
    with server.client() as client:
        asked = {"model": "long name " * 100_000, "prompt": "x"}
        assert client.post("/v1/completions", json=asked, headers={"X-Request-Id": "long-name"}).status_code == 404
    (line,) = until(lambda: [line for line in _requests(server) if line["id"] == "long-name"])
    assert line["model"] == ("long name " * 20) + "…"
