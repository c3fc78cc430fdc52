"""`fw runs`: what is told of runs, from their directories alone."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
import yaml

from conftest import fw, metrics, summary
from fw.training.environment import note_end
from fw.training.past_runs import last_row
from fw.training.same_run import held, lock_of

RUN = ("train.max_steps=4", "train.save_every=2", "train.val_every=2", "train.sample_tokens=0")


@pytest.fixture
def run(workspace: Path) -> Path:
    fw("train", "tiny.yaml", *RUN, "train.run_dir=runs/one").ok()
    return workspace / "runs" / "one"


def told(*words: str) -> dict[str, dict]:
    done = fw("runs", "--json", *words)
    assert done.code in (0, 1), done.err
    return {Path(each["directory"]).name: each for each in json.loads(done.out)}


def test_a_run_that_is_over(run):
    (one,) = told().values()
    assert (one["state"], one["step"], one["max_steps"]) == ("finished", 4, 4)
    assert one["loss"] == metrics(run)[-1]["loss"] and one["val_loss"] == summary(run)["val_loss"]
    step = run / "checkpoints" / "step-00000004"
    listed = sum(each["size"] for each in json.loads((step / "manifest.json").read_text())["files"].values())
    assert Path(one["checkpoint"]["place"]).samefile(step)
    assert (one["checkpoint"]["step"], one["checkpoint"]["size_bytes"], one["checkpoint"]["problems"]) == (4, listed, [])
    lines = fw("runs").ok().out.splitlines()
    assert (
        lines[0].split()[:2] == ["run", "state"] and lines[1].startswith("runs/one  finished   4/4  ") and "step 4, complete," in lines[1]
    )
    assert "step 4, whole," in fw("runs", "--verify").ok().out


def test_one_that_goes_on_and_one_that_ended_early(run):
    tree = yaml.safe_load((run / "config.resolved.yaml").read_text())
    tree["train"]["max_steps"] = 9
    (run / "config.resolved.yaml").write_text(yaml.safe_dump(tree))
    assert told()["one"]["state"] == "not finished" and told()["one"]["val_loss"] == metrics(run)[-1]["val_loss"]
    with held(run):
        assert told()["one"]["state"] == "running"
    assert told()["one"]["state"] == "not finished", "looking at it holds nothing"
    ended = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True).stdout.strip()
    lock_of(run).write_text(f"process {ended} on {socket.gethostname()}\n")  # as SIGKILL leaves it
    assert told()["one"]["state"] == "not finished"
    fw("train", "tiny.yaml", *RUN, "train.max_steps=9", "train.run_dir=runs/one", "resume=auto").ok()
    assert (told()["one"]["state"], told()["one"]["step"]) == ("finished", 9)


def test_one_that_failed_and_one_that_was_stopped(run):
    failed = fw("train", "tiny.yaml", *RUN, "train.max_steps=6", "optimizer.lr=1e30", "train.run_dir=runs/bad")
    assert failed.code == 1
    bad = told()["bad"]
    assert bad["state"] == "failed" and bad["said"] and bad["said"] in failed.err
    assert f"runs/bad: {bad['said']}" in fw("runs").ok().out
    note_end(run, None, 75)
    tree = yaml.safe_load((run / "config.resolved.yaml").read_text())
    tree["train"]["max_steps"] = 9
    (run / "config.resolved.yaml").write_text(yaml.safe_dump(tree))
    assert (told()["one"]["state"], told()["one"]["said"]) == ("stopped", "")


def test_damages_are_told(run):
    shutil.copytree(run, run.with_name("cut"))
    shutil.copytree(run, run.with_name("flipped"))
    shutil.copytree(run, run.with_name("bare"))
    shutil.rmtree(run.with_name("bare") / "checkpoints")
    cut, flipped = (run.with_name(name) / "checkpoints" / "step-00000004" / "model.safetensors" for name in ("cut", "flipped"))
    data = cut.read_bytes()
    cut.write_bytes(data[:-1])
    flipped.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    found = told()
    assert (
        found.keys() == {"one", "cut", "flipped", "bare"} and found["bare"]["checkpoint"] is None and found["bare"]["state"] == "finished"
    )
    assert found["cut"]["checkpoint"]["problems"] == [f"model.safetensors has {len(data) - 1} bytes instead of {len(data)}"]
    assert not found["flipped"]["checkpoint"]["problems"], "sizes alone"
    assert told("--verify")["flipped"]["checkpoint"]["problems"] == ["model.safetensors has other bytes than were written"]
    done = fw("runs", "--verify")
    assert (
        done.code == 1 and done.out.count("DAMAGED") == 2 and "flipped/checkpoints/step-00000004: model.safetensors has other" in done.err
    )
    assert fw("runs", "runs/one").code == 0
    (run / "checkpoints" / "step-00000004" / "manifest.json").write_text("{")
    assert "manifest.json is damaged" in told()["one"]["checkpoint"]["problems"][0]


def test_checkpoints_elsewhere(workspace, bucket):
    fw("train", "tiny.yaml", *RUN, "train.run_dir=runs/far", f"checkpoint.to={bucket}/far").ok()
    found = told()["far"]
    assert found["checkpoint"]["step"] == 4 and found["checkpoint"]["place"].startswith("s3://") and not found["checkpoint"]["problems"]


def test_nothing_to_tell_of(workspace):
    done = fw("runs").ok()
    assert not done.out and "no run in runs" in done.err
    assert json.loads(fw("runs", "--json").ok().out) == []
    done = fw("runs", "nowhere")
    assert done.code == 2 and "nowhere: no such directory" in done.err


def test_the_end_of_long_metrics(tmp_path):
    """Of a row that is being written nothing is believed."""
    file = tmp_path / "metrics.csv"
    file.write_text("step,loss,val_loss\n" + "".join(f"{n},{n / 7},\n" for n in range(20_000)) + "20000,3")
    assert last_row(file) == {"step": 19_999.0, "loss": 19_999 / 7}
    file.write_text("step,loss,val_loss\n")
    assert last_row(file) == {} and last_row(tmp_path / "none.csv") == {}
