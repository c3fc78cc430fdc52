"""Ends of batches that nothing else brings about: a full disk at the last moment, a model that never comes, characters that are none."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fw.config import ServeSection
from fw.server import batches
from fw.server.batch_lines import Lines, NotNow
from fw.server.batches import Batches
from fw.server.errors import ApiError
from fw.server.file_schemas import Batch, FileObject, KeptBatch
from fw.server.logs import Log
from fw.server.storage import BATCH, FILE, Storage, new_id
from server import batch_calls as calls

NO_ROOM = OSError(errno.ENOSPC, "No space left on device")


def _kept(place, **more):
    """A batch of one line, which has been begun, on the disk; its input."""
    now = int(time.time())
    file, answers = new_id(FILE), new_id(FILE)
    (place / file).write_text(json.dumps(calls.line(1, prompt="x")) + "\n")
    told = FileObject(id=file, bytes=1, created_at=now, filename="asked.jsonl", purpose="batch")
    (place / f"{file}.json").write_text(told.model_dump_json())
    given = {"model": "ours", "status": "in_progress", "in_progress_at": now, "expires_at": now + 3600, "created_at": now, **more}
    batch = Batch(id=new_id(BATCH), endpoint=calls.TEXT, input_file_id=file, **given)
    batch.request_counts.total = 1
    kept = KeptBatch(batch=batch, output=answers, failed=new_id(FILE))
    (place / f"{batch.id}.json").write_text(kept.model_dump_json())
    return batch.id, file


def _made(place):
    """All batches of a directory, of a server whose engines nobody needs."""
    serve = ServeSection(files_dir=str(place))
    engines = SimpleNamespace(condition="ready", most=2, sequences=0)
    return Batches(SimpleNamespace(settings=SimpleNamespace(serve=serve, name="ours"), engines=engines), Log(None))


@pytest.fixture
def place(tmp_path):
    made = tmp_path / "files"
    made.mkdir(mode=0o700)
    return made


async def _until(what):
    while not (found := what()):
        await asyncio.sleep(0)
    return found


@pytest.mark.parametrize("last", ["cancelled", "expired"])
def test_a_disk_that_is_full_at_the_end_of_a_batch_makes_no_other_end_of_it(place, monkeypatch, last):
    """Once the last word on it cannot be written: tried again, it is the same one."""
    now = int(time.time())
    more = {"status": "cancelling", "cancelling_at": now} if last == "cancelled" else {"expires_at": now - 1}
    id, _ = _kept(place, **more)
    refused = []
    write = Storage.write

    async def full(self, name, record):
        if name == id and record.batch.status == last and not refused:
            refused.append(name)
            raise NO_ROOM
        await write(self, name, record)

    monkeypatch.setattr(Storage, "write", full)
    monkeypatch.setattr("fw.server.batch_run._AGAIN_S", 0)

    async def run():
        made = _made(place)
        made.start()
        await _until(lambda: id not in made._runs)
        await made.close()

    asyncio.run(run())
    batch = json.loads((place / f"{id}.json").read_text())["batch"]
    assert refused and batch["status"] == last and batch[f"{last}_at"] and batch["completed_at"] is None
    assert batch["request_counts"]["failed"] == (last == "expired")


def test_a_batch_whose_model_never_comes_expires(place, monkeypatch):
    id, _ = _kept(place, model="theirs")

    async def run():
        made, later = _made(place), []
        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda *asked: later.append(asked))
        made.start()
        assert made.get(id).status == "in_progress" and not made._runs
        ((seconds, call, *given),) = later
        assert 3500 < seconds <= 3600
        monkeypatch.setattr(batches.time, "time", lambda: made.get(id).expires_at + 1)
        call(*given)
        await _until(lambda: id not in made._runs)
        assert made.get(id).status == "expired" and made.get(id).error_file_id
        call(*given)
        assert not made._runs
        await made.close()

    asyncio.run(run())


def test_a_file_that_cannot_be_deleted_is_there(place, monkeypatch):
    _, file = _kept(place, status="cancelled")

    def full(path, missing_ok=False):
        raise OSError(errno.EROFS, "Read-only file system")

    async def run():
        made = _made(place)
        with monkeypatch.context() as within:
            within.setattr(Path, "unlink", full)
            with pytest.raises(ApiError, match="cannot delete this: Read-only file system") as found:
                await made.files.remove(file)
        assert found.value.status == 507 and made.files.get(file).id == file
        await made.files.remove(file)
        with pytest.raises(ApiError, match="No such File"):
            made.files.get(file)
        await made.close()

    asyncio.run(run())
    assert not [path for path in place.iterdir() if path.name.startswith(file)]


@pytest.mark.parametrize("text", [r'{"custom_id": "\ud800"}', r'{"\udfff": 1}', r'{"url": "\ud800"}', r'{"body": {"prompt": "\ud800"}}'])
def test_half_a_character_in_a_line_is_told(text):
    api = SimpleNamespace(settings=SimpleNamespace(serve=ServeSection()))
    line = json.dumps(calls.line(1, prompt="x") | json.loads(text)).encode()
    with pytest.raises(ApiError, match="surrogate") as found:
        asyncio.run(_read(api, line))
    json.dumps(found.value.body(), ensure_ascii=False).encode()


async def _read(api, line):
    Lines(api, Log(None)).read(line, calls.TEXT)


def test_a_line_that_is_not_answered_now_has_ended(tmp_path):
    """Its span is sent; it is no request that the log has."""
    engines = SimpleNamespace(condition="draining", most=2, sequences=0)
    api = SimpleNamespace(settings=SimpleNamespace(serve=ServeSection()), engines=engines, prompts=lambda prompt: [prompt])
    out, ended = io.StringIO(), []
    lines = Lines(api, Log(out), lambda record, headers: lambda: ended.append(record.id))

    async def answer():
        line = lines.read(json.dumps(calls.line(1, prompt="x")).encode(), calls.TEXT)
        await lines.answer("batch", line, calls.TEXT)

    with pytest.raises(NotNow):
        asyncio.run(answer())
    assert len(ended) == 1 and not out.getvalue()
