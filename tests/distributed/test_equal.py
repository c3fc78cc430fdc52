"""The same run on one rank and on two, over gloo with real processes: losses and gradient norms agree."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import column, environment, fw, metrics, start

SHARDINGS = {"ddp": ("sharding=ddp", "launch.devices=2"), "fsdp": ("sharding=fsdp", "launch.devices=2")}
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "bf16_true": 2e-2}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, str], Path]:
    """Runs of one rank, each made once."""
    made: dict[str, Path] = {}

    def run(workspace: Path, precision: str) -> Path:
        if precision not in made:
            made[precision] = tmp_path_factory.mktemp(precision) / "run"
            fw("train", "tiny.yaml", f"precision={precision}", f"train.run_dir={made[precision]}").ok()
        return made[precision]

    return run


def assert_close(run: Path | str, reference: Path | str, tolerance: float) -> None:
    for name in ("loss", "grad_norm"):
        expected, found = column(reference, name), column(run, name)
        assert len(expected) == len(found) == 20
        worst = max(abs(a - b) / abs(a) for a, b in zip(expected, found, strict=True))
        assert worst <= tolerance, f"{name} differs by {worst}"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_true"])
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_two_ranks_equal_one(workspace, reference, sharding, precision):
    """20 steps with accumulation 2 on each of two ranks and clipping active, against accumulation 4 on one."""
    fw("train", "tiny.yaml", *SHARDINGS[sharding], f"precision={precision}").ok()
    expected = reference(workspace, precision)
    assert max(column(expected, "grad_norm")) > 1.0, "clipping must be active for this to test it"
    assert_close("run", expected, TOLERANCE[precision])


def test_one_rank_of_fsdp_equals_single(workspace, reference):
    fw("train", "tiny.yaml", "sharding=fsdp").ok()
    assert_close("run", reference(workspace, "fp32"), 1e-6)


def test_torchrun_starts_the_same_run(workspace, reference):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "fw"]
    done = subprocess.run(
        [*torchrun, "train", "tiny.yaml", "sharding=ddp"],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert_close("run", reference(workspace, "fp32"), 1e-5)


def test_srun_variables_start_the_same_run(workspace, reference):
    """Two processes with the environment that srun gives its tasks."""
    slurm = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "localhost",
    }
    ids = [{"SLURM_JOB_ID": "4242", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    tasks = [start("train", "tiny.yaml", "sharding=ddp", env={**environment(), **slurm, **task}) for task in ids]
    assert [task.wait(timeout=300) for task in tasks] == [0, 0]
    assert_close("run", reference(workspace, "fp32"), 1e-5)


def test_two_hosts_meet_at_the_rendezvous(workspace, reference):
    """The same command twice, as on two hosts, each with one rank."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ("train", "tiny.yaml", "sharding=ddp", "launch.nodes=2", f"launch.rendezvous=127.0.0.1:{port}")
    hosts = [start(*words) for _ in range(2)]
    assert [host.wait(timeout=300) for host in hosts] == [0, 0]
    assert_close("run", reference(workspace, "fp32"), 1e-5)


def test_validation_does_not_depend_on_ranks_or_batches(workspace):
    fw("train", "tiny.yaml", "train.max_steps=2", "train.val_every=2", "train.run_dir=one").ok()
    fw("train", "tiny.yaml", "train.max_steps=2", "train.val_every=2", "train.run_dir=two", *SHARDINGS["fsdp"]).ok()
    one, two = metrics("one")[-1]["val_loss"], metrics("two")[-1]["val_loss"]
    assert one == pytest.approx(two, rel=1e-6)


def test_parameters_gradients_and_optimizer_are_divided(workspace):
    """What FSDP keeps on a rank is half of the whole, to the byte; measured on the tensors themselves."""
    program = """
import torch.distributed as dist
from fw.config import load
from fw.recipe import current_world, resolve
from fw.launching.membership import join, leave
from fw.assemble import assemble
from torch.distributed.device_mesh import init_device_mesh
import torch
recipe = resolve(load("tiny.yaml", ["sharding=fsdp"]), current_world())
join("gloo")
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
made = assemble(recipe, 258, mesh, torch.device("cpu"))
made.stepper.backward(made.stepper.module(torch.zeros(1, 8, dtype=torch.int64)).sum())
grads = sum(p.grad.to_local().nbytes for _, p in made.stepper.parameters())
made.stepper.step(1.0)
whole = sum(p.numel() * 4 for _, p in made.stepper.parameters())
kept = sum(p.to_local().nbytes for _, p in made.stepper.parameters())
state = sum(t.to_local().nbytes for n, t in made.stepper.optimizer_tensors().items() if not n.endswith("/step"))
assert (kept, grads, state) == (whole // 2, whole // 2, whole), (whole, kept, grads, state)
leave()
"""
    Path("program.py").write_text(program)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "program.py"]
    done = subprocess.run(torchrun, capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr
