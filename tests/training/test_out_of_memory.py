"""Memory that runs out for good: a process that may have no more says where, what has it, and what would have fitted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conftest import environment
from fw.training.out_of_memory import is_out_of_memory

LIMITED = """
import resource, sys, torch
from fw.cli import main
import fw.training.rank, fw.planning.run  # what is imported later takes memory, too
torch.set_num_threads(1)
used = 4096 * int(open("/proc/self/statm").read().split()[5])  # private and writable, stacks included
resource.setrlimit(resource.RLIMIT_DATA, (used + int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(main(sys.argv[2:]))
"""
WORDS = ["data={name: synthetic, vocab_size: 8000, samples: 64}", "train.global_batch_size=16", "train.micro_batch_size=16"]
WORDS += ["train.sequence_length=512", "train.run_dir=run", "launch.threads=1", "train.max_steps=2"]


def limited(mib: int, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LIMITED, str(mib * 2**20), "train", "tiny.yaml", *WORDS, *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of a process")
def test_what_has_the_memory_is_told_and_what_would_have_fitted(workspace: Path) -> None:
    done = limited(220)
    assert done.returncode == 1, done.stderr
    assert "fw: error: out of memory in " in done.stderr
    assert "(step 1, " in done.stderr
    assert "the largest tensors:" in done.stderr
    assert "would have fitted, by plan:" in done.stderr
    report = json.loads((workspace / "run" / "out-of-memory.json").read_text())
    assert report["asked_bytes"] > 2**20
    assert 2**20 < report["taken_bytes"] <= 220 * 2**20
    assert sum(report["parts"].values()) == report["taken_bytes"]
    # The model has 8,000 × 64 numbers in its embedding and as many in its head.
    assert report["parts"]["weights"] > 2 * 8000 * 64 * 4
    assert report["largest"][0]["bytes"] >= report["largest"][-1]["bytes"] > 0
    advised = done.stderr.split("would have fitted, by plan:\n")[1].splitlines()[0].strip().partition(":")[0]
    assert limited(220, *advised.split(" ")).returncode == 0 if "{" not in advised else True
    assert not (workspace / "run" / "out-of-memory.json").exists()


def test_which_errors_say_so() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("could not create a primitive"))
    assert not is_out_of_memory(RuntimeError("could not create a primitive descriptor for a matmul primitive"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert is_out_of_memory(caught.value)
