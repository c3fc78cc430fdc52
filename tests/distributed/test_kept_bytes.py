"""What a rank keeps of parameters, gradients and optimizer state falls as one over the number of ranks, by malloc's own count; the stepper
accounts for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conftest import environment
from distributed.ranks import ends
from fw.meter.memory import malloc_in_use_bytes

SHARDINGS = {
    "fsdp": ["sharding=fsdp"],
    # Nothing is kept whole for being small, and no bucket beside the gradients.
    "zero 3": ["sharding={name: zero, stage: 3, stage3_param_persistence_threshold: 0, reduce_bucket_size: 1}"],
}


def kept(ranks: int, overrides: list[str]) -> list[tuple[int, int]]:
    program = str(Path(__file__).with_name("kept_bytes.py"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), program, "tiny.yaml", *overrides]
    # MKL would keep the buffers of its matrix products, some 10 MiB.
    quiet = {**environment(), "MKL_DISABLE_FAST_MM": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(torchrun, capture_output=True, text=True, env=quiet, timeout=300)
    assert done.returncode == 0, ends(done.stderr)
    numbers = [int(word) for word in done.stdout.replace("kept", " ").split()]
    assert len(numbers) == 2 * ranks
    return list(zip(numbers[::2], numbers[1::2], strict=True))


@pytest.mark.skipif(malloc_in_use_bytes() is None, reason="only glibc counts what malloc gave out")
@pytest.mark.parametrize("sharding", [pytest.param(of, marks=[pytest.mark.slow] if of == "zero 3" else []) for of in SHARDINGS])
def test_falls_as_one_over_ranks(workspace: Path, sharding: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = {ranks: kept(ranks, SHARDINGS[sharding]) for ranks in (1, 2, 4)}
    whole = found[1][0][0]
    with capsys.disabled():
        shown = {n: [tuple(round(b / 2**20, 1) for b in pair) for pair in each] for n, each in found.items()}
        print(f"\n{sharding}: MiB kept by each rank, and its account: {shown}")
    for ranks, each in found.items():
        for kept_bytes, account in each:
            assert abs(kept_bytes * ranks / whole - 1) < 0.03, found
            assert abs(account / kept_bytes - 1) < 0.03, found
