"""What a run leaves of how it was made, and that it can be repeated by it."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from conftest import column, environment, fw
from fw.training.environment import git, last_end, weights

GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]


def starts(run: str) -> list[dict]:
    lines = [json.loads(line) for line in Path(run, "environment.jsonl").read_text().splitlines()]
    return [line for line in lines if "started" in line]


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


PLUGIN = """
import torch
import fw
from fw.api import OptimizerPlugin, OptimizerSpec

@fw.register("mine")
class Mine(OptimizerPlugin):
    \"\"\"SGD.\"\"\"
    api = 1

    def spec(self, device):
        return OptimizerSpec(torch.optim.SGD, LR, 0.0, {})
"""


def test_a_changed_tree_is_repeated_by_what_the_run_left(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The commit elsewhere, the patch on it, the plugin's file from the run's directory."""
    Path("mine.py").write_text(PLUGIN.replace("LR", "0.5"))
    for name, content in {
        "lines.txt": b"0\n2\n3\n4\n \n",
        "dos.txt": b"a\r\nb\r\n",
        "latin.txt": b"caf\xe9\n",
        "raw.bin": b"\0\1\n\n",
    }.items():
        Path(name).write_bytes(content)
    for words in (["init", "-q"], ["add", "-A", "--", ":!mine.py"], ["commit", "-q", "-m", "all"]):
        subprocess.run([*GIT, *words], check=True)
    Path("tiny.yaml").write_text(Path("tiny.yaml").read_text().replace("max_steps:", "seed: 11\n  max_steps:", 1))
    # What patches are easily broken by: an end that is an empty line of context, other line ends, bytes that are no UTF-8.
    changed = {"lines.txt": b"1\n2\n3\n4\n \n", "dos.txt": b"a\r\nc\r\n", "latin.txt": b"caf\xe9s\n", "raw.bin": b"\0\2\n\n"}
    for name, content in changed.items():
        Path(name).write_bytes(content)
    subprocess.run([*GIT, "config", "color.ui", "always"], check=True)
    subprocess.run([*GIT, "config", "diff.noprefix", "true"], check=True)
    fw("train", "tiny.yaml", "plugins=[mine.py]", "optimizer=mine", "train.max_steps=3").ok()
    (start,) = starts("run")
    patch, (plugin,) = start["patch"], start["plugin_files"].values()
    assert start["git"]["changed"] and start["seed"] == 11
    run = (workspace / "run").resolve()

    elsewhere = tmp_path_factory.mktemp("elsewhere") / "tree"
    subprocess.run(["git", "clone", "-q", str(workspace), str(elsewhere)], check=True)
    subprocess.run(["git", "checkout", "-q", start["git"]["commit"]], cwd=elsewhere, check=True)
    subprocess.run(["git", "apply", str(run / patch)], cwd=elsewhere, check=True)
    assert (elsewhere / "tiny.yaml").read_text() == Path("tiny.yaml").read_text()
    assert {name: (elsewhere / name).read_bytes() for name in changed} == changed
    assert (run / patch).stat().st_mode & 0o077 == 0
    Path("mine.py").unlink()  # what is not there cannot be what is used
    (elsewhere / "mine.py").write_bytes((run / plugin).read_bytes())
    words = start["command"][start["command"].index("train") + 1 :]
    fw("train", *words, cwd=elsewhere).ok()
    assert column(elsewhere / "run", "loss") == column("run", "loss")
    (again,) = starts(elsewhere / "run")
    assert again["data"] == start["data"]


def test_weights_that_training_begins_from_are_told_apart(workspace: Path) -> None:
    fw("train", "tiny.yaml", "train.max_steps=2", "train.save_every=2").ok()
    assert starts("run")[0]["weights"] is None and len(starts("run")[0]["data"]) > 8
    step = Path("run/checkpoints/step-00000002")
    before = weights(step)
    assert before is not None and before == weights(step) and before["path"] == str(step)
    with (step / "model.safetensors").open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"x")
    assert weights(step) != before


def test_a_change_in_the_middle_of_a_tensor_is_told(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(size) for name, size in (("a", 100_000), ("b", 3), ("c", 100_000), ("d", 100_000))}
    save_file(tensors, tmp_path / "model.safetensors")
    seen = {weights(tmp_path)["sha256_of_parts"]}
    for name in "abc":
        tensors[name][tensors[name].numel() // 2] += 1
        save_file(tensors, tmp_path / "model.safetensors")
        seen.add(weights(tmp_path)["sha256_of_parts"])
    assert len(seen) == 4
    (tmp_path / "model.safetensors").write_bytes(b"no such file")
    assert weights(tmp_path)["sha256_of_parts"] not in seen


def test_how_each_start_ended_is_noted(workspace: Path) -> None:
    fw("train", "tiny.yaml", "train.max_steps=2", "train.save_every=2").ok()
    assert last_end(Path("run"))["exit_code"] == 0 and "said" not in last_end(Path("run"))
    failed = fw("train", "tiny.yaml", "train.max_steps=4", "optimizer.lr=1e30", "resume=auto")
    end = last_end(Path("run"))
    assert failed.code == 1 and end["exit_code"] == 1 and end["said"] in failed.err
    both = fw("train", "tiny.yaml", "train.max_steps=3", "optimizer.lr=1e30", "train.run_dir=two", "sharding=ddp", "launch.devices=2")
    assert both.code == 1 and last_end(Path("two"))["exit_code"] == 1
    wrong = fw("train", "tiny.yaml", "data.files=[nowhere.txt]", "resume=auto")
    assert wrong.code == 2 and last_end(Path("run")) == end, "who never started says nothing about the run that is there"


def test_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    assert git(Path(__file__).parent) is None
