"""What a shell would offer, asked as a shell asks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import environment, fw


def offered(line: str) -> list[str]:
    """By argcomplete's protocol: the line in the environment, answers on file descriptor 8."""
    asks = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_SHELL": "bash"}
    script = 'exec "$0" -m fw 8>&1 1>/dev/null'
    done = subprocess.run(
        ["bash", "-c", script, sys.executable], env={**environment(), **asks}, capture_output=True, text=True, timeout=60, check=True
    )
    return [word.strip() for word in done.stdout.split("\n") if word.strip()]


def test_verbs_and_options() -> None:
    assert offered("fw pla") == ["plan"] and {"train", "plan", "init", "serve"} <= set(offered("fw "))
    assert offered("fw plan x.yaml --dev") == ["--device"]
    assert offered("fw data pre") == ["prepare", "preview"]


def test_overrides() -> None:
    assert "sharding=" in offered("fw train x.yaml sha")
    assert set(offered("fw train x.yaml sharding=f")) == {"fsdp"} or offered("fw train x.yaml sharding=f") == ["sharding=fsdp"]
    assert offered("fw train x.yaml train.max") == ["train.max_steps=", "train.max_tokens_per_batch="]


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "mine.txt").touch()
    monkeypatch.chdir(tmp_path)
    assert offered("fw train mi") == ["mine.yaml"]


def test_nothing_heavy_is_imported() -> None:
    """A shell waits for it. By another program, since Python starts Python here with all of that loaded."""
    code = "import sys; from fw.cli.completing import overrides; overrides('train.'), overrides('sharding='); print('torch' in sys.modules)"
    words = ["bash", "-c", 'exec "$0" -c "$1"', sys.executable, code]
    assert subprocess.run(words, capture_output=True, text=True, env=environment(), check=True).stdout == "False\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_take_the_code(shell: str) -> None:
    code = fw("completion", shell).ok().out
    assert "_ARGCOMPLETE" in code and "fw" in code
    if (program := shutil.which(shell)) is not None:
        checked = subprocess.run([program, "-n"], input=code, text=True, capture_output=True, env=dict(os.environ))
        assert checked.returncode == 0, checked.stderr
