"""A directory that is there whole or not at all, whatever ends its maker."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fw.errors import UserError
from fw.pretrained.new_directory import new_directory

MAKER = """
import signal, sys
from pathlib import Path
from fw.pretrained.new_directory import new_directory
with new_directory(Path(sys.argv[1])) as made:
    (made / "half").write_text("of it")
    print("begun", flush=True)
    signal.pause()
"""


def maker(target: Path) -> subprocess.Popen[str]:
    """A process that has begun to make it, and waits."""
    process = subprocess.Popen([sys.executable, "-c", MAKER, str(target)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    return process


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_is_asked_to_end_leaves_nothing(tmp_path: Path, which: signal.Signals) -> None:
    process = maker(tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] != []
    process.send_signal(which)
    process.communicate(timeout=60)
    assert process.returncode == -which  # as if nobody had cleared up first
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_has_left_goes_with_the_next(tmp_path: Path) -> None:
    process = maker(tmp_path / "target")
    process.kill()
    process.communicate(timeout=60)
    assert len(list(tmp_path.iterdir())) == 1
    with new_directory(tmp_path / "target") as made:
        assert list(tmp_path.iterdir()) == [made]
        (made / "all").write_text("of it")
    assert [path.name for path in tmp_path.rglob("*")] == ["target", "all"]


def test_what_another_is_making_stays(tmp_path: Path) -> None:
    process = maker(tmp_path / "target")
    with new_directory(tmp_path / "target") as made:
        assert len(list(tmp_path.iterdir())) == 2
        assert not (made / "half").exists()
    process.terminate()
    process.communicate(timeout=60)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_what_is_there_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds notes\.txt"):
        new_directory(tmp_path / "target", overwrite=True)


def test_what_another_has_made_meanwhile_stays(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with (
        pytest.raises(UserError, match=r"by another meanwhile; what was to go there is now .*\.1"),
        new_directory(target) as made,
    ):
        (made / "mine").write_text("mine")
        with new_directory(target) as other:
            (other / "theirs").write_text("theirs")
    assert (target / "theirs").exists() and (tmp_path / "target.1" / "mine").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target", "target.1"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_model_takes_the_place_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool) -> None:
    if not exchanges:
        monkeypatch.setattr("fw.pretrained.new_directory.exchange", lambda one, other: False)
    for text in ("one", "two"):
        with new_directory(tmp_path / "target", overwrite=True) as made:
            (made / "config.json").write_text(text)
    assert (tmp_path / "target" / "config.json").read_text() == "two" and [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_handler_of_the_program_stays(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        own = signal.getsignal(signal.SIGTERM)
        with new_directory(tmp_path / "target"):
            assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
    with new_directory(tmp_path / "another"):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is before
