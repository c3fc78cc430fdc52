"""Verbs that talk much print one JSON document to stdout with --json, whatever their ranks print."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import fw, summary


@pytest.mark.parametrize("ranks", [1, 2])
def test_train(workspace: Path, ranks: int) -> None:
    done = fw("train", "tiny.yaml", "--json", "train.max_steps=2", *(["sharding=ddp", "launch.devices=2"] if ranks > 1 else [])).ok()
    said = json.loads(done.out)
    assert said == {"exit_code": 0, "run_dir": "run", "summary": summary("run")}
    assert "report: run/report.html" in done.err


def test_train_that_is_refused_says_nothing_there(workspace: Path) -> None:
    done = fw("train", "tiny.yaml", "--json", "train.max_steps=no")
    assert (done.code, done.out) == (2, "")


def test_init(workspace: Path, small_model: Callable[[str], Path]) -> None:
    words = ("--task", "serve", "--model", str(small_model("llama")), "--device", "cpu", "--budget", "2GiB")
    said = json.loads(fw("init", *words, "--json").ok().out)
    assert said["file"] == "serve.yaml" and Path("serve.yaml").is_file()
    assert said["next"] and any("serve.yaml" in command for command in said["next"])
    assert "fits" in said["told"]


def test_launch_gives_the_jobs_number(workspace: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path_factory.mktemp("tools")
    (tools / "sbatch").write_text("#!/bin/sh\ncat >submitted\necho '4711;cluster'\n")
    (tools / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    words = ("launch", "slurm", "tiny.yaml", "sharding=ddp", "launch.devices=2", "launch.accelerator=cpu", "--json")
    said = json.loads(fw(*words).ok().out)
    assert (said["launcher"], said["job"], said["run_dir"]) == ("slurm", "4711", "run")
    assert said["submission"] == Path("submitted").read_text()
    Path("submitted").unlink()
    dry = json.loads(fw(*words, "--dry-run").ok().out)
    assert dry["job"] is None and dry["submission"] == said["submission"]
    assert not Path("submitted").exists()
