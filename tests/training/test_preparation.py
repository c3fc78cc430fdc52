"""`fw data prepare`: what a run would make of its data, once; interrupted, it goes on; what there is to know of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from conftest import environment, fw, own_cache
from fw.training.preparation import histogram
from fw_plugins.data import ids_file
from fw_plugins.data.tokenizer import byte_tokenizer

TEXTS = [f"{n} " * (n % 7 + 1) for n in range(1000)]


def test_a_run_finds_everything_done(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FW_CACHE", own_cache(workspace / "cache"))
    Path("texts").mkdir()
    for number in range(40):
        Path(f"texts/{number}.txt").write_text(f"number {number % 37} and more " * (number % 37 + 1))
    files = "data.files=[texts/*.txt]"
    told = fw("data", "prepare", "tiny.yaml", files, "--html", "page.html", "--png", "lengths.png", "--json").ok()
    found = json.loads(told.out)
    assert found["facts"] == {"documents": 37, "duplicates": 3}
    assert found["vocab_size"] == 257 and found["bytes_per_token"] == pytest.approx(1, rel=0.02)
    assert 20 <= sum(number for *_, number in found["histogram"]) < 37, "but for what is held out"
    assert found["histogram"][-1][:2] == [512, 1024]
    page = Path("page.html").read_text()
    assert "<svg" in page and "http://" not in page.replace("http://www.w3.org", "") and Path("lengths.png").read_bytes()[:4] == b"\x89PNG"
    again = fw("data", "prepare", "tiny.yaml", files).ok()
    assert "data:" not in again.err and "tokens of a document" in again.out and "█" in again.out
    trained = fw("train", "tiny.yaml", files, "train.max_steps=1").ok()
    assert "data:" not in trained.err


def test_duplicates_and_bad_records_are_counted(workspace: Path) -> None:
    fw("train", "tiny.yaml", "train.max_steps=1", "train.save_every=1").ok()
    lines = [json.dumps({"text": f"number {n % 30}"}) for n in range(40)] + ["not json"]
    Path("texts.jsonl").write_text("\n".join(lines))
    words = ["data={name: jsonl, files: [texts.jsonl], tokenizer: run/checkpoints/latest}", "data.val_fraction=0.2"]
    failed = fw("data", "prepare", "tiny.yaml", *words)
    assert failed.code == 2 and "texts.jsonl:41: it is no JSON" in failed.err
    found = json.loads(fw("data", "prepare", "tiny.yaml", *words, "data.on_bad=skip", "--json").ok().out)
    assert found["facts"] == {"documents": 40, "duplicates": 10, "bad": 1}
    Path("texts.jsonl").write_text("\n".join(json.dumps({"text": f"{n} " * 300}) for n in range(10, 50)))
    found = json.loads(fw("data", "prepare", "tiny.yaml", *words, "--json").ok().out)
    assert [low for low, *_ in found["histogram"]] == [512], "whole documents, and not what fits a row of 64"


class _Counting:
    def __init__(self, stops_after: int) -> None:
        self.tokenizer, self.encoded, self._left = byte_tokenizer(), 0, stops_after

    def encode_all(self, texts: list[str], **how: bool) -> list[list[int]]:
        if self._left == 0:
            raise KeyboardInterrupt
        self._left -= 1
        self.encoded += len(texts)
        return self.tokenizer.encode_all(texts, **how)


@pytest.mark.parametrize("torn", [b"", b"half a batch"])
def test_who_is_interrupted_goes_on(tmp_path: Path, torn: bytes) -> None:
    """Whatever the files have beyond what was noted."""
    whole, file = tmp_path / "whole.bin", tmp_path / "train.bin"
    ids_file.write_ids(whole, iter(TEXTS), _Counting(-1), 256, "uint16", "all", len(TEXTS))
    first, second = _Counting(2), _Counting(-1)
    with pytest.raises(KeyboardInterrupt):
        ids_file.write_ids(file, iter(TEXTS), first, 256, "uint16", "some", len(TEXTS))
    with file.open("ab") as out:
        out.write(torn)
    ids_file.write_ids(file, iter(TEXTS), second, 256, "uint16", "rest", len(TEXTS))
    assert first.encoded + second.encoded == len(TEXTS) and first.encoded == 512
    assert file.read_bytes() == whole.read_bytes()
    assert ids_file.sizes_of(file).read_bytes() == ids_file.sizes_of(whole).read_bytes()
    assert [int(n) for n in ids_file.lengths_of(file)] == [len(text) for text in TEXTS]
    assert not list(tmp_path.glob("*.progress*"))


KILLED = """
import os, signal
from fw.cli import main
from fw_plugins.data import ids_file

note, noted = ids_file._note, []


def note_and_die(*said):
    note(*said)
    noted.append(said)
    if len(noted) == 2:
        os.kill(os.getpid(), signal.SIGKILL)


ids_file._note, ids_file._BATCH = note_and_die, 8
main(["data", "prepare", "tiny.yaml"])
"""


def test_a_killed_process_leaves_what_the_next_one_uses(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fingerprint is that of a pass that nobody killed."""
    Path("corpus.txt").write_text("\n\n".join(f"{n} and more words of document {n}" for n in range(60_000)))
    expected = _fingerprint(workspace / "quiet", monkeypatch)
    cache = workspace / "killed"
    monkeypatch.setenv("FW_CACHE", str(cache))
    assert subprocess.run([sys.executable, "-c", KILLED], env=environment(), capture_output=True).returncode == -signal.SIGKILL
    (left,) = cache.glob("*.tmp")
    assert json.loads((left / "train.progress").read_text())["documents"] == 16
    assert _fingerprint(cache, monkeypatch) == expected and not list(cache.glob("*.tmp"))


def _fingerprint(cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FW_CACHE", str(cache))
    fw("data", "prepare", "tiny.yaml").ok()
    (meta,) = cache.glob("text-*/meta.json")
    return str(json.loads(meta.read_text())["fingerprint"])


def test_bins_are_powers_of_two() -> None:
    assert histogram(np.array([3, 4, 5, 7, 8, 33])) == [(2, 4, 1), (4, 8, 3), (8, 16, 1), (16, 32, 0), (32, 64, 1)]
    assert histogram(np.zeros(0, np.int64)) == []
