"""Memory given back between phases: resident bytes fall, by as much as was free or in cycles."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from conftest import environment, fw, summary

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what is kept free is glibc's")

MIB = 2**20
PROGRAM = """
import gc, sys, torch
from fw.meter.memory import held_bytes
from fw.training.host_allocator import keep_freed_memory
from fw.training.release import Release
gc.disable()
cpu, MIB = torch.device("cpu"), 2**20
assert keep_freed_memory()
phase = [torch.ones(2 * MIB) for _ in range(24)]  # 8 MiB each, as activations of a validation
cycle = {"tensors": [torch.ones(2 * MIB) for _ in range(12)]}
cycle["itself"] = cycle
end = torch.ones(16)
del phase, cycle
before = held_bytes(cpu)
release = Release(cpu, thorough=sys.argv[1] == "thorough")
release.between_phases()
after = held_bytes(cpu)
print((before - after) // MIB, (release.bytes or 0) // MIB, release.times)
"""


def fallen(how: str) -> list[int]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, env=environment(), timeout=200)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_what_is_free_goes_back_and_what_is_in_cycles_too():
    """192 MiB are free and 96 in a cycle."""
    by_default, *nothing = fallen("default")
    assert 150 < by_default < 240 and nothing == [0, 0]
    thorough, measured, times = fallen("thorough")
    assert thorough > 260 and abs(measured - thorough) < 8 and times == 1


def test_a_run_says_what_it_gave_back(workspace):
    words = ["train.max_steps=4", "train.val_every=2", "train.save_every=2", "train.sequence_length=256", "train.micro_batch_size=8"]
    done = fw("train", "tiny.yaml", *words, "memory.release=true").ok()
    found = summary("run")
    # The beginning, before and after each validation, after each checkpoint, and the end.
    assert found["releases"] == 8 and found["release_seconds"] > 0
    logits = 8 * 256 * 258 * 4
    assert found["released_bytes"] > 2 * logits, "a step's logits and their gradient at least"
    assert "released between phases" in done.out and "MiB in 8 times" in done.out
    plain = fw("train", "tiny.yaml", *words, "train.run_dir=plain").ok()
    assert "releases" not in summary("plain") and "released" not in plain.out
    assert summary("plain")["train_loss"] == found["train_loss"]
