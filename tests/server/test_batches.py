"""Files of requests, with OpenAI's own client: what is asked, what goes wrong, and servers that end in the middle."""

from __future__ import annotations

import json
import os
import resource
import signal
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from conftest import fw as run_fw
from serving import serving, until

CHAT, TEXT, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
ENDED = ("completed", "failed", "cancelled", "expired")
MAX_BODY = 4096


def _line(number, url=TEXT, **body):
    return {"custom_id": f"line {number}", "method": "POST", "url": url, "body": body}


def _long(count, max_tokens=200):
    """Lines that take their time."""
    return [_line(n, prompt=f"{n}, ", max_tokens=max_tokens, temperature=0, ignore_eos=True) for n in range(count)]


def _upload(client, lines):
    text = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines)
    return client.files.create(file=("asked.jsonl", text.encode()), purpose="batch").id


def _create(client, lines, endpoint=TEXT, **more):
    return client.batches.create(input_file_id=_upload(client, lines), endpoint=endpoint, completion_window="24h", **more)


def _until(client, batch, what):
    return until(lambda: (found := client.batches.retrieve(batch.id)) and what(found) and found)


def _ended(client, batch):
    return _until(client, batch, lambda found: found.status in ENDED)


def _lines(client, file):
    return [json.loads(text) for text in client.files.content(file).text.splitlines()] if file else []


def _answers(client, batch):
    """Of both files by ``custom_id``, of which none is there twice; as many as are counted."""
    well, failed = _lines(client, batch.output_file_id), _lines(client, batch.error_file_id)
    assert (len(well), len(failed)) == (batch.request_counts.completed, batch.request_counts.failed)
    found = {each["custom_id"]: each for each in [*well, *failed]}
    assert len(found) == len(well) + len(failed) and all(set(each) == {"id", "custom_id", "response", "error"} for each in found.values())
    assert len({each["id"] for each in found.values()}) == len(found)
    return found


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
    batch = _create(client, [_line(n, endpoint, **body) for n, body in enumerate(bodies)], endpoint, metadata={"whose": "ours"})
    assert batch.status == "validating" and not batch.model_extra and batch.expires_at - batch.created_at == 24 * 60 * 60
    batch = _ended(client, batch)
    assert batch.status == "completed" and batch.metadata == {"whose": "ours"} and batch.endpoint == endpoint
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert (batch.request_counts.total, batch.error_file_id, batch.errors) == (len(bodies), None, None)
    told = client.files.retrieve(batch.output_file_id)
    assert (told.purpose, told.filename) == ("batch_output", f"{batch.id}_output.jsonl") and not told.model_extra
    assert told.bytes == len(client.files.content(told.id).content)
    answers = _answers(client, batch)
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
    good = _line(1, prompt="x")
    lines = [
        good,
        '{"custom_id": "half',
        "[]",
        "",
        {**good, "body": {"prompt": "another"}},
        {**_line(2), "url": CHAT},
        {**_line(3), "method": "GET"},
        {"method": "POST", "url": TEXT, "body": {}},
        {**_line(4), "body": "x"},
        {**_line(5), "more": 1},
        _line(6, prompt="x" * MAX_BODY),
        "[" * 3000,
        '{"custom_id": "\\ud800", "method": "POST", "url": "/v1/completions", "body": {}}',
        _line(7, prompt="x"),
    ]
    batch = _ended(client, _create(client, lines))
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
        13: "invalid_value",
    }
    assert [error.param for error in batch.errors.data][2:6] == ["custom_id", "url", "method", "custom_id"]
    empty = _ended(client, _create(client, ["", ""]))
    assert [(error.line, error.code) for error in empty.errors.data] == [(None, "empty_file")]
    many = _ended(client, _create(client, ["x"] * 1000))
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
        "more than there is room for": ({"prompt": ["x"] * 7, "max_tokens": 1}, 429, "queue_full"),
    }
    lines = [{**_line(0, **body), "custom_id": name} for name, (body, _, _) in wrong.items()]
    wide = [_line("wide", prompt=["x"] * 6, max_tokens=1)]  # more than are computed at once; some of it must wait
    batch = _ended(client, _create(client, [*_long(2, 5), *lines, *wide, *_long(6, 5)[2:]]))
    assert batch.status == "completed" and (batch.request_counts.completed, batch.request_counts.failed) == (7, len(wrong))
    answers = _answers(client, batch)
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
    batch = _create(client, _long(300, 20))
    _until(client, batch, lambda found: found.request_counts.completed)
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
    _ended(client, batch)


def test_a_batch_that_is_cancelled_keeps_its_answers(batching, client):
    lines = _long(200)
    lines[0]["body"]["max_tokens"] = 1
    batch = _create(client, lines)
    _until(client, batch, lambda found: found.request_counts.completed)
    with pytest.raises(openai.BadRequestError, match="cancel it first"):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = _ended(client, batch)
    assert batch.status == "cancelled" and batch.cancelling_at <= batch.cancelled_at
    assert 0 < batch.request_counts.completed < 200 and not batch.request_counts.failed
    assert len(_answers(client, batch)) == batch.request_counts.completed
    assert batching.idle()
    assert client.batches.cancel(batch.id).status == "cancelled"
    client.files.delete(batch.input_file_id)
    done = _ended(client, _create(client, _long(1, 1)))
    with pytest.raises(openai.BadRequestError, match="completed"):
        client.batches.cancel(done.id)


def test_files(batching, client):
    before = {file.id for file in client.files.list()}
    ids = [_upload(client, [f"{n}"]) for n in range(5)]
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
        lines = ["POST /v1/files HTTP/1.1", "Host: here", "Content-Type: multipart/form-data; boundary=b", "Content-Length: 9999", "", ""]
        sock.sendall("\r\n".join(lines).encode() + head + b"x")
        until(lambda: list(batching.place.glob("*.part")))
    until(lambda: not list(batching.place.glob("*.part")))
    assert until(lambda: [line for line in batching.log if line.get("status") == 499])
    with batching.raw() as sock:
        sock.sendall(f"GET /v1/files/{id}/content HTTP/1.1\r\nHost: here\r\n\r\n".encode())
        assert sock.recv(10)
    assert client.files.content(id).content == content
    assert not [line for line in batching.log if line["event"] == "log"]


def test_no_room_on_the_disk(batching, client):
    """As far as the server can tell: its files may not grow."""
    file = _upload(client, ["x"])
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
    file = _upload(client, ["x"])
    strange = ("lock", "..", "../lock", "%2e%2e%2flock", "..%2F..%2Fetc%2Fpasswd", "%2Fetc%2Fpasswd", f"{file}%00", f"{file}.json")
    strange += (file.upper(), file[:-1], f"{file}0", file.replace("file-", "batch_"), "a" * 3000, f"{file}%0A")
    kinds = (("files", ""), ("files", "/content"), ("batches", ""))
    for path in [f"/v1/{kind}/{id}{rest}" for kind, rest in kinds for id in (*strange, f"x/../{file}")]:
        with batching.raw() as sock:  # as it stands, where a client would tidy it
            sock.sendall(f"GET {path} HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n".encode())
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


def _record(files, batch):
    return json.loads((files / f"{batch.id}.json").read_text())


def test_whatever_ends_a_server_no_line_is_lost_or_repeated(directory, tmp_path):
    """Its engine is killed; then it is killed itself, with a line half written; then it is asked to end; then time is over."""
    files = tmp_path / "made" / "files"
    words = [f"serve.files_dir={files}", "inference.dtype=fp32", "inference.max_sequences=2", "--name", "ours"]
    lines = _long(60, 100)
    with serving(directory, *words) as server:
        client = server.openai()
        batch = _create(client, lines)
        _until(client, batch, lambda found: found.request_counts.completed >= 3)
        os.kill(server.engine(), signal.SIGKILL)
        assert server.ended() == 1
    record = _record(files, batch)
    assert record["batch"]["status"] == "in_progress" and not (files / record["failed"]).exists()
    assert files.stat().st_mode & 0o777 == 0o700 and all(path.stat().st_mode & 0o777 == 0o600 for path in files.iterdir())
    first = (files / record["output"]).read_bytes()

    with serving(directory, *words) as server:
        client = server.openai()
        found = _until(client, batch, lambda found: found.request_counts.completed >= first.count(b"\n") + 3)
        assert found.status == "in_progress"
        size = (files / record["output"]).stat().st_size + 100  # in the middle of a line the disk is full
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        until(lambda: [line for line in server.log if "tries again" in line.get("message", "")])
        assert client.batches.retrieve(batch.id).status == "in_progress"
        server.process.kill()
        server.ended()
    second = (files / record["output"]).read_bytes()
    assert second.startswith(first) and not second.endswith(b"\n")
    second = second[: second.rindex(b"\n") + 1]
    (files / f"{record['failed']}.part").write_text("x")
    orphan = files / ("file-" + "0" * 24)
    orphan.write_text("of an upload that did not end")

    with serving(directory, *words, "--drain", "60") as server:
        client = server.openai()
        assert not orphan.exists() and not list(files.glob("*.part"))
        batch = _ended(client, batch)
        answers = _answers(client, batch)
        assert batch.status == "completed" and set(answers) == {line["custom_id"] for line in lines}
        content = client.files.content(batch.output_file_id).content
        assert content.startswith(second)
        for number in (0, 59):
            alone = server.client().post(TEXT, json=lines[number]["body"]).json()
            assert alone["choices"][0]["text"] == answers[f"line {number}"]["response"]["body"]["choices"][0]["text"]
        late, waits = _create(client, lines), _create(client, lines)
        _until(client, late, lambda found: found.request_counts.completed >= 2)
        server.terminate()
        assert server.ended() == 0
        log = server.log  # what had begun has ended
        (at,) = [number for number, line in enumerate(log) if line["event"] == "draining"]
        ended = [line for line in log[at:] if line["event"] == "request" and "batch" in line]
        assert log[at]["sequences"] <= len(ended) <= 4 and all(line["status"] == 200 for line in ended)
    for each in (late, waits):
        record = _record(files, each)
        assert record["batch"]["status"] in ("validating", "in_progress") and not (files / record["failed"]).exists()
    record = _record(files, late)
    done = (files / record["output"]).read_bytes()
    record["batch"]["expires_at"] = record["batch"]["created_at"]
    (files / f"{late.id}.json").write_text(json.dumps(record))

    with serving(directory, *words[:-1], "theirs") as server:
        client = server.openai()
        assert client.files.content(batch.output_file_id).content == content
        found = run_fw("serve", str(directory), "--port", "0", *words)
        assert found.code == 2 and "another server" in found.err and str(server.process.pid) in found.err
        late = _ended(client, late)
        assert late.status == "expired" and client.files.content(late.output_file_id).content == done
        answers = _answers(client, late)
        assert set(answers) == {line["custom_id"] for line in lines} and late.request_counts.failed == 60 - done.count(b"\n")
        for each in _lines(client, late.error_file_id):
            assert each["response"] is None and each["error"]["code"] == "batch_expired"
        # Of another model it answers nothing; it can be cancelled all the same.
        assert client.batches.retrieve(waits.id).status in ("validating", "in_progress")
        assert [line for line in server.log if line.get("id") == waits.id and "ours" in line.get("message", "")]
        client.batches.cancel(waits.id)
        assert _ended(client, waits).status == "cancelled"


@pytest.mark.parametrize("what", ["file", "others", "record"])
def test_a_directory_that_cannot_be_used(directory, tmp_path, what):
    place = tmp_path / "files"
    if what == "file":
        place.write_text("")
    else:
        place.mkdir()
        place.chmod(0o777 if what == "others" else 0o700)
        (place / ("batch_" + "0" * 24 + ".json")).write_text("{")
    found = run_fw("serve", str(directory), "--port", "0", f"serve.files_dir={place}")
    assert found.code == 2 and "serve.files_dir" in found.err and str(place) in found.err
