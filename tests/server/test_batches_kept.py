"""Batches outlive their server, however it ends."""

from __future__ import annotations

import json
import os
import resource
import signal

import pytest

from conftest import fw as run_fw
from server import batch_calls as calls
from server.batch_calls import TEXT
from serving import serving, until


def _record(files, batch):
    return json.loads((files / f"{batch.id}.json").read_text())


def test_whatever_ends_a_server_no_line_is_lost_or_repeated(directory, tmp_path):
    """Its engine is killed; then it is killed itself, with a line half written; then it is asked to end; then time is over."""
    files = tmp_path / "made" / "files"
    words = [f"serve.files_dir={files}", "inference.dtype=fp32", "inference.max_sequences=2", "--name", "ours"]
    lines = calls.long_lines(60, 100)
    with serving(directory, *words) as server:
        client = server.openai()
        batch = calls.create(client, lines)
        calls.wait_until(client, batch, lambda found: found.request_counts.completed >= 3)
        os.kill(server.engine(), signal.SIGKILL)
        assert server.ended() == 1
    record = _record(files, batch)
    assert record["batch"]["status"] == "in_progress" and not (files / record["failed"]).exists()
    assert files.stat().st_mode & 0o777 == 0o700 and all(path.stat().st_mode & 0o777 == 0o600 for path in files.iterdir())
    first = (files / record["output"]).read_bytes()

    with serving(directory, *words) as server:
        client = server.openai()
        found = calls.wait_until(client, batch, lambda found: found.request_counts.completed >= first.count(b"\n") + 3)
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
        batch = calls.ended(client, batch)
        answers = calls.answers(client, batch)
        assert batch.status == "completed" and set(answers) == {line["custom_id"] for line in lines}
        content = client.files.content(batch.output_file_id).content
        assert content.startswith(second)
        for number in (0, 59):
            alone = server.client().post(TEXT, json=lines[number]["body"]).json()
            assert alone["choices"][0]["text"] == answers[f"line {number}"]["response"]["body"]["choices"][0]["text"]
        late, waits = calls.create(client, lines), calls.create(client, lines)
        calls.wait_until(client, late, lambda found: found.request_counts.completed >= 2)
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
        late = calls.ended(client, late)
        assert late.status == "expired" and client.files.content(late.output_file_id).content == done
        answers = calls.answers(client, late)
        assert set(answers) == {line["custom_id"] for line in lines} and late.request_counts.failed == 60 - done.count(b"\n")
        for each in calls.lines_of(client, late.error_file_id):
            assert each["response"] is None and each["error"]["code"] == "batch_expired"
        # Of another model it answers nothing; it can be cancelled all the same.
        assert client.batches.retrieve(waits.id).status in ("validating", "in_progress")
        assert [line for line in server.log if line.get("id") == waits.id and "ours" in line.get("message", "")]
        client.batches.cancel(waits.id)
        assert calls.ended(client, waits).status == "cancelled"


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
