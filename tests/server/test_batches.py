"""Files of requests, with OpenAI's own client: what is asked, and what goes wrong."""

from __future__ import annotations

import os
import resource
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from server import batch_calls as calls
from server.batch_calls import CHAT, EMBEDDINGS, TEXT
from serving import serving, until

MAX_BODY = 4096


@pytest.fixture(scope="module")
def batching(directory, tmp_path_factory):
    """Four sequences at once, two may wait, and small bodies. Its files are gone with it."""
    place = tmp_path_factory.mktemp("temporary")
    words = ["inference.dtype=fp32", "inference.max_sequences=4", "--max-queue", "2", f"serve.max_body={MAX_BODY}"]
    # PYTHONHASHSEED: a process that begins as users' do, for which the temporary directory has not been looked for yet.
    with serving(directory, *words, environment={"TMPDIR": str(place), "PYTHONHASHSEED": "1"}) as made:
        (made.place,) = place.glob("fw-files-*")
        yield made
    assert not list(place.glob("fw-files-*"))


@pytest.fixture(scope="module")
def client(batching):
    return batching.openai()


@pytest.mark.parametrize("endpoint", [CHAT, TEXT, EMBEDDINGS])
def test_answers_are_those_of_requests_by_themselves(batching, client, endpoint):
    texts = ["once", "a longer one, of more tokens", "x", "é漢", "once more"]
    if endpoint == CHAT:
        bodies = [{"messages": [{"role": "user", "content": text}], "max_tokens": 12, "temperature": 0, "n": 2} for text in texts]
    elif endpoint == TEXT:
        bodies = [{"prompt": [text, text + text], "max_tokens": 12, "temperature": 0, "logprobs": 1, "echo": True} for text in texts]
    else:
        bodies = [{"input": [text, text + text], "dimensions": 7} for text in texts]
        bodies.append({"input": [f"text {n}" for n in range(19)]})  # more than there is ever room for at once
    batch = calls.create(client, [calls.line(n, endpoint, **body) for n, body in enumerate(bodies)], endpoint, metadata={"whose": "ours"})
    assert batch.status == "validating" and not batch.model_extra and batch.expires_at - batch.created_at == 24 * 60 * 60
    batch = calls.ended(client, batch)
    assert batch.status == "completed" and batch.metadata == {"whose": "ours"} and batch.endpoint == endpoint
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert (batch.request_counts.total, batch.error_file_id, batch.errors) == (len(bodies), None, None)
    told = client.files.retrieve(batch.output_file_id)
    assert (told.purpose, told.filename) == ("batch_output", f"{batch.id}_output.jsonl") and not told.model_extra
    assert told.bytes == len(client.files.content(told.id).content)
    answers = calls.answers(client, batch)
    with batching.client() as plain:
        for number, body in enumerate(bodies):
            answer = answers[f"line {number}"]
            assert answer["error"] is None and answer["response"]["status_code"] == 200
            found, right = answer["response"]["body"], plain.post(endpoint, json=body).json()
            for each in (found, right):
                each.pop("id", None), each.pop("created", None), each["usage"].pop("prompt_tokens_details", None)
            if endpoint == EMBEDDINGS:
                for one, other in zip(found.pop("data"), right.pop("data"), strict=True):
                    assert one["embedding"] == pytest.approx(other["embedding"], abs=1e-5) and one["index"] == other["index"]
            for one, other in zip(found.get("choices", []), right.get("choices", []), strict=True):
                if endpoint == TEXT:
                    one, other = one.pop("logprobs"), other.pop("logprobs")
                    assert one["tokens"] == other["tokens"]
                    assert one["token_logprobs"][1:] == pytest.approx(other["token_logprobs"][1:], abs=1e-4)
            assert found == right
    requests = {line["id"]: line for line in batching.log if line.get("batch") == batch.id and line["event"] == "request"}
    assert set(requests) == {each["response"]["request_id"] for each in answers.values()}
    assert all(line["status"] == 200 and line["path"] == endpoint for line in requests.values())


def test_a_file_that_is_wrong_is_told_by_line(client):
    good = calls.line(1, prompt="x")
    lines = [
        good,
        '{"custom_id": "half',
        "[]",
        "",
        {**good, "body": {"prompt": "another"}},
        {**calls.line(2), "url": CHAT},
        {**calls.line(3), "method": "GET"},
        {"method": "POST", "url": TEXT, "body": {}},
        {**calls.line(4), "body": "x"},
        {**calls.line(5), "more": 1},
        calls.line(6, prompt="x" * MAX_BODY),
        "[" * 3000,
        '{"custom_id": "\\ud800", "method": "POST", "url": "/v1/completions", "body": {}}',
        calls.line(7, prompt="x"),
    ]
    batch = calls.ended(client, calls.create(client, lines))
    assert batch.status == "failed" and batch.failed_at and (batch.output_file_id, batch.error_file_id) == (None, None)
    assert {error.line: error.code for error in batch.errors.data} == {
        2: "invalid_json_line",
        3: "invalid_json_line",
        5: "duplicate_custom_id",
        6: "invalid_url",
        7: "invalid_value",
        8: "missing_required_parameter",
        9: "invalid_value",
        10: "unknown_parameter",
        11: "request_too_large",
        12: "invalid_json_line",
        13: "invalid_json_line",
    }
    assert [error.param for error in batch.errors.data][2:6] == ["custom_id", "url", "method", "custom_id"]
    empty = calls.ended(client, calls.create(client, ["", ""]))
    assert [(error.line, error.code) for error in empty.errors.data] == [(None, "empty_file")]
    many = calls.ended(client, calls.create(client, ["x"] * 1000))
    assert len(many.errors.data) == 100


def test_a_line_that_fails_fails_alone(batching, client):
    wrong = {
        "a field": ({"prompt": "x", "bogus": 1}, 400, "unknown_parameter"),
        "a value": ({"prompt": "x", "temperature": "warm"}, 400, "invalid_value"),
        "a stream": ({"prompt": "x", "stream": True}, 400, None),
        "a model": ({"prompt": "x", "model": "none"}, 404, "model_not_found"),
        "too long": ({"prompt": "x" * 2100}, 400, "context_length_exceeded"),
        "too many": ({"prompt": "x", "n": 17}, 400, None),
        "a token": ({"prompt": [70_000]}, 400, None),
        "a form": ({"prompt": "x", "regex": "("}, 400, None),
        "more than there is room for": ({"prompt": ["x"] * 7, "max_tokens": 1}, 400, "too_many_sequences"),
    }
    lines = [{**calls.line(0, **body), "custom_id": name} for name, (body, _, _) in wrong.items()]
    wide = [calls.line("wide", prompt=["x"] * 6, max_tokens=1)]  # more than are computed at once; some of it must wait
    batch = calls.ended(client, calls.create(client, [*calls.long_lines(2, 5), *lines, *wide, *calls.long_lines(6, 5)[2:]]))
    assert batch.status == "completed" and (batch.request_counts.completed, batch.request_counts.failed) == (7, len(wrong))
    answers = calls.answers(client, batch)
    for name, (body, status, code) in wrong.items():
        response = answers[name]["response"]
        assert (response["status_code"], response["body"]["error"]["code"]) == (status, code), name
        with batching.client() as plain:
            if not body.get("stream"):
                assert plain.post(TEXT, json=body).json() == response["body"]
    assert len(answers["line wide"]["response"]["body"]["choices"]) == 6
    assert batching.idle()


def test_who_waits_for_an_answer_is_not_refused_for_a_batch(batching, client):
    """A batch has what is computed at once, and nothing of the queue, which two may wait in."""
    batch = calls.create(client, calls.long_lines(300, 20))
    calls.wait_until(client, batch, lambda found: found.request_counts.completed)
    sizes = []

    def ask(number):
        with batching.client() as plain:
            for n in range(20):
                assert plain.post(TEXT, json={"prompt": f"{number} {n}", "max_tokens": 3}).status_code == 200
                state = plain.get("/stats").json()
                sizes.append(state["running"] + state["waiting"])

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(ask, range(2)))
    assert client.batches.retrieve(batch.id).status == "in_progress" and max(sizes) <= 6
    client.batches.cancel(batch.id)
    calls.ended(client, batch)


def test_a_batch_that_is_cancelled_keeps_its_answers(batching, client):
    lines = calls.long_lines(200)
    lines[0]["body"]["max_tokens"] = 1
    batch = calls.create(client, lines)
    calls.wait_until(client, batch, lambda found: found.request_counts.completed)
    with pytest.raises(openai.BadRequestError, match="cancel it first"):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = calls.ended(client, batch)
    assert batch.status == "cancelled" and batch.cancelling_at <= batch.cancelled_at
    assert 0 < batch.request_counts.completed < 200 and not batch.request_counts.failed
    assert len(calls.answers(client, batch)) == batch.request_counts.completed
    assert batching.idle()
    assert client.batches.cancel(batch.id).status == "cancelled"
    client.files.delete(batch.input_file_id)
    done = calls.ended(client, calls.create(client, calls.long_lines(1, 1)))
    with pytest.raises(openai.BadRequestError, match="completed"):
        client.batches.cancel(done.id)


def test_files(batching, client):
    before = {file.id for file in client.files.list()}
    ids = [calls.upload(client, [f"{n}"]) for n in range(5)]
    assert [file.id for file in client.files.list(limit=2) if file.id not in before] == ids[::-1]  # page after page
    assert [file.id for file in client.files.list(order="asc", limit=3) if file.id not in before] == ids
    assert set(ids) <= {file.id for file in client.files.list(purpose="batch")}
    assert not set(ids) & {file.id for file in client.files.list(purpose="batch_output")}
    told = client.files.retrieve(ids[3])
    assert (told.bytes, told.filename, told.purpose, told.status) == (1, "asked.jsonl", "batch", "processed") and not told.model_extra
    content = client.files.content(ids[3])
    assert content.content == b"3" and content.response.headers["content-type"] == "application/octet-stream"
    deleted = client.files.delete(ids[3])
    assert deleted.deleted and deleted.id == ids[3] and not deleted.model_extra
    for what in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            what(ids[3])
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id=ids[3], endpoint=TEXT, completion_window="24h")
    batches = [client.batches.create(input_file_id=ids[0], endpoint=TEXT, completion_window="24h").id for _ in range(3)]
    assert [batch.id for batch in client.batches.list(limit=2)][:3] == batches[::-1]
    for batch in batches:
        assert until(lambda batch=batch: client.batches.retrieve(batch).status == "failed")


def test_large_files_come_and_go_as_they_are(batching, client):
    """Of random bytes with a form's own marks in it; no larger than they may be."""
    most = 64 * MAX_BODY
    content = os.urandom(most - 2000) + b"\r\n--x\r\n\r\n--"
    id = client.files.create(file=('a\r\n"b"; c/é漢.jsonl', content), purpose="batch").id
    assert client.files.content(id).content == content
    before = len(client.files.list().data)
    with pytest.raises(openai.APIStatusError) as refused:
        client.files.create(file=("large.jsonl", b"x" * most), purpose="batch")
    assert refused.value.status_code == 413 and refused.value.code == "request_too_large"
    with batching.client() as plain:  # likewise in pieces, whose length nobody tells
        head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        pieces = iter([head, *[b"x" * 4096] * 70])
        found = plain.post("/v1/files", content=pieces, headers={"Content-Type": "multipart/form-data; boundary=b"})
        assert found.status_code == 413
    assert len(client.files.list().data) == before
    with batching.raw() as sock:  # and of one that goes nothing is left
        lines = ["POST /v1/files HTTP/1.1", "Host: [::1]", "Content-Type: multipart/form-data; boundary=b", "Content-Length: 9999", "", ""]
        sock.sendall("\r\n".join(lines).encode() + head + b"x")
        until(lambda: list(batching.place.glob("*.part")))
    until(lambda: not list(batching.place.glob("*.part")))
    assert until(lambda: [line for line in batching.log if line.get("status") == 499])
    with batching.raw() as sock:
        sock.sendall(f"GET /v1/files/{id}/content HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert sock.recv(10)
    assert client.files.content(id).content == content
    assert not [line for line in batching.log if line["event"] == "log"]


def test_no_room_on_the_disk(batching, client):
    """As far as the server can tell: its files may not grow."""
    file = calls.upload(client, ["x"])
    known, left = len(client.files.list().data), sorted(batching.place.iterdir())
    before = resource.prlimit(batching.process.pid, resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    try:
        for ask in (
            lambda: client.files.create(file=("f", b"x" * 200), purpose="batch"),
            lambda: client.files.create(file=("f", b"x"), purpose="batch"),  # there is room for it, and none for what is known of it
            lambda: client.batches.create(input_file_id=file, endpoint=TEXT, completion_window="24h"),
        ):
            with pytest.raises(openai.InternalServerError) as refused:
                ask()
            assert (refused.value.status_code, refused.value.code) == (507, "storage_failed")
    finally:
        resource.prlimit(batching.process.pid, resource.RLIMIT_FSIZE, before)
    assert len(client.files.list().data) == known and sorted(batching.place.iterdir()) == left
    assert not [batch for batch in client.batches.list() if batch.input_file_id == file]


def test_files_have_a_space(directory, tmp_path):
    """Which what comes at once shares, and what is deleted gives back."""
    with serving(directory, f"serve.files_dir={tmp_path / 'files'}", "serve.files_space=1MiB") as server:
        client = server.openai()

        def upload(size):
            return client.files.create(file=("f", b"x" * size), purpose="batch").id

        first = upload(600_000)
        for _ in range(2):
            with pytest.raises(openai.InternalServerError) as refused:
                upload(600_000)
            assert (refused.value.status_code, refused.value.code) == (507, "storage_full")
        assert upload(300_000) and len(client.files.list().data) == 2
        client.files.delete(first)
        assert upload(600_000)
        assert len(list((tmp_path / "files").glob("file-*"))) == 4, "and a record beside each"


def test_forms_that_are_wrong(batching):
    part = '--b\r\nContent-Disposition: form-data; name="{}"{}\r\n\r\n{}\r\n'
    file, purpose = part.format("file", '; filename="f"', "x"), part.format("purpose", "", "batch")
    cases = [
        ("", None),
        (file + purpose, "invalid_form"),  # without an end
        (file + "--b--", "missing_required_parameter"),
        (purpose + "--b--", "missing_required_parameter"),
        (file + part.format("purpose", "", "fine-tune") + "--b--", "invalid_value"),
        (file + part.format("purpose", "", "x" * 1000) + "--b--", "invalid_value"),
        (file + file + purpose + "--b--", "invalid_value"),
        (part.format("file", "", "x") + purpose + "--b--", "invalid_value"),
        (file + purpose + part.format("expires_after[seconds]", "", "3600") + "--b--", "unknown_parameter"),
        ("--c--", "invalid_form"),
        ("--b\r\n" + "x" * 20_000, "invalid_form"),
        ("--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--", "unknown_parameter"),
    ]
    with batching.client() as plain:
        for text, code in cases:
            found = plain.post("/v1/files", content=text.encode(), headers={"Content-Type": "multipart/form-data; boundary=b"})
            assert found.status_code == 400 and code in (None, found.json()["error"]["code"]), text
        for kind in ("multipart/form-data", "multipart/form-data; boundary=" + "b" * 1000, "application/json", "text/plain", "é"):
            found = plain.post("/v1/files", content=b"{}", headers={"Content-Type": kind.encode("latin-1")})
            assert found.status_code == 400 and found.json()["error"]["code"] == "invalid_form", kind
        whole, kind = (file + purpose + "--b--").encode(), {"Content-Type": "multipart/form-data; boundary=b"}
        # A page of another origin can send a form without asking.
        for origin in ("https://other.example", "null", "http://["):
            assert plain.post("/v1/files", content=whole, headers={**kind, "Origin": origin}).status_code == 403
        assert plain.post("/v1/files", content=whole, headers={**kind, "Origin": batching.url}).status_code == 200


def test_ids_are_no_paths(batching, client):
    file = calls.upload(client, ["x"])
    strange = ("lock", "..", "../lock", "%2e%2e%2flock", "..%2F..%2Fetc%2Fpasswd", "%2Fetc%2Fpasswd", f"{file}%00", f"{file}.json")
    strange += (file.upper(), file[:-1], f"{file}0", file.replace("file-", "batch_"), "a" * 3000, f"{file}%0A")
    kinds = (("files", ""), ("files", "/content"), ("batches", ""))
    for path in [f"/v1/{kind}/{id}{rest}" for kind, rest in kinds for id in (*strange, f"x/../{file}")]:
        with batching.raw() as sock:  # as it stands, where a client would tidy it
            sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            status = sock.makefile("rb").readline().split()[1]
            assert status in (b"404", b"405"), path
    with batching.client() as plain:
        for id in strange:
            assert plain.delete(f"/v1/files/{id}").status_code in (404, 405)
            assert plain.post(f"/v1/batches/{id}/cancel").status_code in (404, 405)
            asked = {"input_file_id": id, "endpoint": TEXT, "completion_window": "24h"}
            assert plain.post("/v1/batches", json=asked).status_code == 404
        asked = {"input_file_id": file, "endpoint": TEXT, "completion_window": "24h"}
        for more in ({"endpoint": "/v1/responses"}, {"completion_window": "1h"}, {"metadata": {"a": 1}}, {"output_expires_after": {}}):
            assert plain.post("/v1/batches", json=asked | more).status_code == 400
        for query in ("limit=0", "limit=x", "after=..", "order=up"):
            assert plain.get(f"/v1/files?{query}").status_code == 400
        assert plain.get("/v1/batches?limit=101").status_code == 400
    assert client.files.content(file).text == "x"
