"""The batch script: what bash and sbatch make of it, and what it does with the ranks' exit codes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from conftest import start
from fw.cli import main
from fw.config import load

TWO = ("sharding=ddp", "launch.devices=2")


@pytest.fixture
def script(workspace, capsys):
    def written(*overrides: str) -> str:
        capsys.readouterr()
        assert main(["launch", "slurm", "tiny.yaml", *TWO, "--dry-run", *overrides]) == 0
        return capsys.readouterr().out

    return written


def test_the_script_asks_for_what_the_options_say(script):
    options = ("time=1-12:00:00", "partition=long", "mem=64G", "gpus=h100:2", "sbatch=[--exclusive]", "prologue=[module load cuda]")
    text = script("launch.nodes=2", "launch.accelerator=auto", "launch.threads=4", *(f"launcher.{option}" for option in options))
    asked = {line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")}
    assert {"--nodes=2", "--ntasks-per-node=2", "--time=1-12:00:00", "--partition=long", "--mem=64G", "--exclusive"} <= asked
    assert {"--gpus-per-node=h100:2", "--cpus-per-task=4", "--requeue", "--signal=TERM@120", "--job-name=tiny"} <= asked
    assert "\nmodule load cuda\n" in text and "--cpus-per-task=4" in text.partition("srun ")[2]
    assert not any("gpus" in line for line in script().splitlines()), "launch.accelerator=cpu"
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    if shutil.which("sbatch") and subprocess.run(["sinfo"], capture_output=True).returncode == 0:
        subprocess.run(["sbatch", "--test-only"], input=script(), text=True, check=True)


def test_the_config_travels_in_the_script_as_it_was(script):
    text = script("train.seed=${train.max_steps}", "launcher.time=0:30:00")
    Path("job").mkdir()
    Path("job/tiny.yaml").write_text(text.partition("FW_CONFIG_END'\n")[2].partition("FW_CONFIG_END\n")[0])
    tree = load("job/tiny.yaml").tree
    assert tree["train"]["seed"] == "${train.max_steps}" and tree["launcher"] == {"name": "slurm", "time": "0:30:00"}


@pytest.mark.parametrize(
    ("codes", "restarts", "state", "code", "again", "resumed"),
    [
        ([0], 2, "RUNNING", 0, False, [False]),
        ([1, 0], 1, "RUNNING", 0, False, [False, True]),
        ([1, 137], 1, "RUNNING", 137, False, [False, True]),
        ([2], 5, "RUNNING", 2, False, [False]),
        ([75], 0, "RUNNING", 0, True, [False]),
        ([143], 3, "RUNNING", 0, True, [False]),
        ([75], 0, "CANCELLED", 75, False, [False]),
    ],
)
def test_exit_codes_decide_what_comes_next(script, tmp_path, codes, restarts, state, code, again, resumed):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tmp_path / "codes").write_text("".join(f"{number}\n" for number in codes))
    stubs = {
        "srun": 'echo "$@" >>ran; code=$(head -1 codes); sed -i 1d codes; exit $code',
        "squeue": f"echo {state}",
        "scontrol": 'echo "$@" >>requeued',
    }
    for name, body in stubs.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    text = script(f"launch.max_restarts={restarts}")
    done = subprocess.run(["bash"], input=text, text=True, env=env, capture_output=True)
    assert done.returncode == code, done.stderr
    assert Path("requeued").exists() == again and (not again or Path("requeued").read_text() == "requeue 7\n")
    assert ["resume=auto" in line for line in Path("ran").read_text().splitlines()] == resumed
    requeued = subprocess.run(["bash"], input=text, text=True, env={**env, "SLURM_RESTART_COUNT": "1"}, capture_output=True)
    assert "resume=auto" in Path("ran").read_text().splitlines()[len(resumed)], requeued.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slurm", "tiny.yaml", "launcher.time=soon"], "launcher.time: 'soon' is no time for sbatch"),
        (["slurm", "tiny.yaml", "launcher.tim=1"], "unknown key 'tim' in 'launcher'; did you mean 'time'?"),
        (["slurm", "tiny.yaml", "data.files=nowhere.txt"], "data.files: 'nowhere.txt' matches no file"),
        (["slurm", "tiny.yaml", "--image", "x"], "unknown key 'image' in 'launcher'"),
        (["slrum", "tiny.yaml"], "unknown launcher 'slrum'; did you mean 'slurm'?"),
        (["local", "tiny.yaml"], "launcher 'local' has no cluster to submit to; 'fw train tiny.yaml' starts it right here"),
    ],
)
def test_wrong_input_is_found_before_submission(workspace, capsys, words, message):
    assert main(["launch", *words]) == 2
    assert message in capsys.readouterr().err


def test_without_sbatch_it_says_so(workspace, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert main(["launch", "slurm", "tiny.yaml", *TWO]) == 2
    assert "there is no 'sbatch' on this machine" in capsys.readouterr().err


def test_train_refuses_to_start_ranks_for_slurm_but_is_a_rank_under_srun(workspace):
    assert main(["train", "tiny.yaml", *TWO, "launcher=slurm"]) == 2
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    under_srun = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "localhost"}
    ranks = [
        start("train", "tiny.yaml", *TWO, "launcher=slurm", f"launch.port={port}", env={**os.environ, **under_srun, **own})
        for own in ({"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n), "SLURM_JOB_ID": str(os.getpid())} for n in range(2))
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    assert Path("run/summary.json").is_file()
