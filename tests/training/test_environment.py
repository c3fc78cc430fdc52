"""What a run leaves of how it was made, and that it can be repeated by it."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
from pathlib import Path

import pytest
import torch

from conftest import column, environment, fw
from fw.training.environment import git

GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]


def starts(run: str) -> list[dict]:
    return [json.loads(line) for line in Path(run, "environment.jsonl").read_text().splitlines()]


def test_every_start_is_noted(workspace: Path) -> None:
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*GIT, *words], check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    secret = {**environment(), "FW_API_KEY": "hush", "NCCL_DEBUG": "WARN"}
    signed = "train.sample_prompt=https://me:hush@host/x"
    fw("train", "tiny.yaml", signed, "train.max_steps=2", "train.save_every=2", "train.seed=3", env=secret).ok()
    (first,) = starts("run")
    assert first["git"] == {"commit": commit, "changed": False} and first["seed"] == 3 and first["ranks"] == 1
    assert first["packages"]["torch"] == importlib.metadata.version("torch") and first["torch"]["version"] == torch.__version__
    assert first["host"]["cores"] and first["host"]["memory_bytes"] > 1e9 and first["host"]["processor"]
    assert first["environment"]["NCCL_DEBUG"] == "WARN" and "hush" not in Path("run/environment.jsonl").read_text()
    assert first["command"][-4:] == ["train.sample_prompt=https://…@host/x", "train.max_steps=2", "train.save_every=2", "train.seed=3"]

    Path("tiny.yaml").write_text(Path("tiny.yaml").read_text() + "\n")
    fw("train", "tiny.yaml", "train.max_steps=4", "train.save_every=2", "train.seed=3", "resume=auto").ok()
    assert [start["git"]["changed"] for start in starts("run")] == [False, True]
    assert not list(Path("run/checkpoints").rglob("environment.jsonl")), "checkpoints are of no host"


def test_a_run_is_repeated_by_what_it_left(workspace: Path) -> None:
    fw("train", "tiny.yaml", "train.max_steps=3", "optimizer.lr=2e-3").ok()
    fw("train", "run/config.yaml", "train.run_dir=again").ok()
    assert column("again", "loss") == column("run", "loss")
    one, other = (start["packages"] for start in (*starts("run"), *starts("again")))
    assert one == other


def test_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    assert git(Path(__file__).parent) is None
