"""What a plan says of loading, validating, saving and resuming, against ranks that do so."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import environment, fw
from distributed.ranks import ends
from fw.planning.plan import plan

CASES = {
    "single": (1, []),
    "8-bit": (1, ["optimizer=adamw_8bit", "model.hidden_size=256", "model.num_hidden_layers=1"]),
    "lora": (1, ["peft=lora"]),
    "nf4, lora": (1, ["quantization=nf4", "peft=lora", "precision=bf16"]),
    "bf16_true": (1, ["precision=bf16_true", "optimizer=lion"]),
    "ddp": (2, ["sharding=ddp"]),
    "full_eval": (1, ["precision={name: bf16, full_eval: true}"]),
    "fsdp": (2, ["sharding=fsdp"]),
    "hsdp, 8-bit": (4, ["sharding={name: fsdp, replicate: 2}", "optimizer=adamw_8bit"]),
    "zero": (2, ["sharding=zero"]),
    "zero 1": (2, ["sharding={name: zero, stage: 1}", "precision=bf16"]),
}
SLACK = 2048
"""Bytes: generators' states, numbers that are on their way."""


@pytest.mark.parametrize("case", CASES)
def test_assembling_validating_and_saving_take_what_was_planned(workspace: Path, case: str) -> None:
    ranks, overrides = CASES[case]
    overrides = [*overrides, "checkpoint.asynchronous=true", f"launch.devices={ranks}", "train.max_steps=2"]
    overrides += ["train.save_every=2", "train.val_every=2"]
    fw("train", "tiny.yaml", *overrides).ok()
    (checkpoint,) = Path("run/checkpoints").glob("step-*")
    program = [str(Path(__file__).with_name("phases.py")), "tiny.yaml", str(checkpoint), *overrides]
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    done = subprocess.run([sys.executable, *launcher, *program], capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == 0, ends(done.stderr)
    measured = {found["rank"]: found for found in map(json.loads, done.stdout.splitlines())}
    planned = plan("tiny.yaml", *overrides)
    divided = ranks > 1 and "ddp" not in case
    assert measured.keys() == set(range(ranks))
    for rank in planned.per_rank:
        for phase in ("load", "resume"):
            assert rank.phases[phase].allocated_peak == pytest.approx(measured[rank.rank][phase], abs=SLACK), phase
        parts = rank.phases["validate"].parts
        before = sum(parts.get(kept, 0) for kept in ("parameters", "gradients", "optimizer", "buffers", "other"))
        came = sum(parts.values()) - before
        assert came == pytest.approx(measured[rank.rank]["validate"], abs=SLACK)
        together = rank.phases["save"].host - measured[rank.rank]["copies"]
        assert together <= 2 * 257 * 64 * 4 and bool(together) == (divided and rank.phases["save"].disk > 0)
    assert sum(rank.phases["save"].disk for rank in planned.per_rank) == sum(map(tensor_bytes, checkpoint.glob("*.safetensors")))


def tensor_bytes(file: Path) -> int:
    """Of a safetensors file, without its header."""
    with file.open("rb") as opened:
        (header,) = struct.unpack("<Q", opened.read(8))
    return file.stat().st_size - 8 - int(header)
