"""Records that are encoded by several processes, and passes that are interrupted: what is kept is what one process keeps in one pass."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from chats import PLAIN, opened, plugin, write, write_tokenizer
from fw.errors import RunError, UserError
from fw_plugins.data import encoding, jsonl
from fw_plugins.data.encoding import Journal, Outcome

RECORDS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": f"What is {n} and {n}?"}, {"role": "assistant", "content": f"It is {2 * n}."}]}
    for n in range(40)
]
RECORDS[17] = {"messages": [{"role": "user", "content": "Nobody answers."}]}
RECORDS[30] = RECORDS[3]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FW_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(encoding, "BATCH", 4)
    write_tokenizer(tmp_path / "tokenizer", PLAIN)
    write(tmp_path / "chats.jsonl", *RECORDS)
    return tmp_path


def corpus(**options: Any) -> Any:
    return opened(plugin("chat", files=["chats.jsonl"], tokenizer="tokenizer", val_fraction=0.3, **{"on_bad": "skip", **options}))


def told(found: Any) -> tuple[Any, ...]:
    samples = [[sample["input_ids"].tolist(), sample["labels"].tolist()] for sample in (found.train[n] for n in range(len(found.train)))]
    return found.fingerprint, samples, len(found.val), found.facts


@pytest.fixture
def alone(here: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """What one process makes of them."""
    monkeypatch.setattr(jsonl, "_FORMAT", 0)  # elsewhere in the cache
    found = told(corpus())
    assert found[3] == {"documents": 39, "duplicates": 1, "bad": 1}
    monkeypatch.undo()
    monkeypatch.setenv("FW_CACHE", str(here / "cache"))
    monkeypatch.chdir(here)
    monkeypatch.setattr(encoding, "BATCH", 4)
    return found


def journals(here: Path) -> list[Path]:
    return list((here / "cache").rglob("*.journal"))


def test_several_processes_keep_the_same(here: Path, alone: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    original = encoding._Worker.__init__

    def count(self: Any, made_by: Any) -> None:
        original(self, made_by)
        started.append(self._process.pid)

    monkeypatch.setattr(encoding._Worker, "__init__", count)
    monkeypatch.setattr(encoding, "ALONE", 6)
    monkeypatch.setattr(encoding, "usable_cores", lambda: 3)
    assert told(corpus()) == alone
    assert len(set(started)) == 3 and not journals(here)
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)


@pytest.mark.parametrize("torn", [b'["torn', b"\0\0\0\n", b'["00"]\n["01", [], ""]\n'], ids=["killed", "no power", "no outcome"])
def test_who_is_interrupted_goes_on(here: Path, alone: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, torn: bytes) -> None:
    encoded: list[Any] = []
    original = jsonl.ChatData._encoded

    def interrupted(self: Any, record: Any, tokenizer: Any) -> Any:
        encoded.append(record)
        if len(encoded) == 22:
            raise KeyboardInterrupt
        return original(self, record, tokenizer)

    monkeypatch.setattr(jsonl.ChatData, "_encoded", interrupted)
    with pytest.raises(KeyboardInterrupt):
        corpus()
    (journal,) = [file for file in journals(here) if file.stat().st_size]
    kept = len(journal.read_bytes().splitlines()) - 1  # whose first says what has made it
    assert kept == 20, "five whole batches"
    with journal.open("ab") as file:
        file.write(torn)
    encoded.clear()
    assert told(corpus()) == alone
    assert len(encoded) == len(RECORDS) - kept and not journals(here)


def test_one_that_ends_is_said_and_what_was_made_is_kept(here: Path, alone: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "ALONE", 8)
    monkeypatch.setattr(encoding, "usable_cores", lambda: 2)
    original = encoding._Worker.ask

    def killed(self: Any, *asked: Any) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()
        original(self, *asked)

    with monkeypatch.context() as patched:
        patched.setattr(encoding._Worker, "ask", killed)
        with pytest.raises(RunError, match="has ended with exit code -9; what was encoded is kept"):
            corpus()
    assert sum(len(file.read_bytes().splitlines()) - 1 for file in journals(here)) == 8
    assert told(corpus()) == alone


def test_nothing_is_left_of_input_that_is_wrong(here: Path) -> None:
    with pytest.raises(UserError, match=r"chats.jsonl:18: .*nothing to learn"):
        corpus(on_bad="stop")
    assert not list((here / "cache").glob("*.tmp"))


def test_what_another_process_cannot_import_is_encoded_here(here: Path, alone: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "ALONE", 4)
    monkeypatch.setattr(encoding._Worker, "__init__", lambda *given: pytest.fail("a process was started"))
    monkeypatch.setattr(jsonl.ChatData, "__module__", "fw_file_of_somebodys")
    assert told(corpus()) == alone


def test_where_processes_do_not_begin_it_is_encoded_here(here: Path, alone: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "ALONE", 4)
    monkeypatch.setattr(encoding, "usable_cores", lambda: 2)
    monkeypatch.setattr(encoding, "_WORK", encoding._WORK.replace("import work;", "import nothing;"))
    assert told(corpus()) == alone


class Unpicklable(dict):  # type: ignore[type-arg]
    def __reduce__(self) -> Any:
        raise TypeError("no process but this one has it")


def test_what_no_other_process_can_be_given_is_encoded_here(here: Path, alone: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "ALONE", 4)
    monkeypatch.setattr(encoding, "usable_cores", lambda: 2)
    original = encoding._batches
    monkeypatch.setattr(encoding, "_batches", lambda values: ([*map(Unpicklable, batch)] for batch in original(values)))
    assert told(corpus()) == alone


def test_what_other_code_has_made_is_not_kept(tmp_path: Path) -> None:
    file = tmp_path / "a.journal"
    for made_by, kept in (("one", 0), ("one", 1), ("other", 0), ("other", 1)):
        journal = Journal(file, made_by)
        assert len(list(journal.kept())) == kept, made_by
        if not kept:
            with journal.added() as add:
                add([Outcome("00ff", (), "")])


def test_a_journal_gives_back_what_it_was_given(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a.journal", "code")
    assert list(journal.kept()) == []
    given = [Outcome("00ff", ([[1, 2], [0, 1]],), ""), Outcome("", (), "it has nothing to learn ✓")]
    with journal.added() as add:
        add(given)
    found = list(journal.kept())
    assert json.dumps(found) == json.dumps(given) and found[1].wrong == given[1].wrong
