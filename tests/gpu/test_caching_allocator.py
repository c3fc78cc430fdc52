"""torch's own CUDA caching allocator beside its simulation: the same sequences, the same bytes after each change, the same addresses.

A process of its own plays each sequence, so that no memory of other tests is there. Where the driver puts a segment is told to the
simulation; all else it works out.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from typing import Any

import pytest
import torch

from fw.planning.caching_allocator import CachingAllocator

MIB = 1024**2
EMPTY = "empty"


def changes(seed: int, steps: int = 400, most_bytes: int = 1536 * MIB) -> list[tuple[int | str, int]]:
    """What is to be done: a key with the bytes to allocate, a key with 0 to free, or to empty the cache. Never above ``most_bytes``."""
    chance = random.Random(seed)
    # Sizes of a training step repeat; these do, too.
    sizes = [int(2 ** chance.uniform(0, 26)) for _ in range(25)]
    live: dict[int, int] = {}
    done: list[tuple[int | str, int]] = []
    for step in range(steps):
        nbytes = chance.choice(sizes)
        if chance.random() < 0.02:
            done.append((EMPTY, 0))
        elif live and (chance.random() < 0.45 or sum(live.values()) + nbytes > most_bytes):
            key = chance.choice(list(live))
            done.append((key, 0))
            del live[key]
        else:
            live[step] = nbytes
            done.append((step, nbytes))
    return done


def play(seed: int) -> list[dict[str, Any]]:
    """The sequence on the device, with what torch says after each change."""
    tensors: dict[int | str, torch.Tensor] = {}
    torch.cuda.init()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    said = []
    for key, nbytes in changes(seed):
        if key == EMPTY:
            torch.cuda.empty_cache()
        elif nbytes:
            tensors[key] = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        else:
            del tensors[key]
        said.append(
            {
                "address": tensors[key].data_ptr() if nbytes else None,
                "allocated": torch.cuda.memory_allocated(),
                "reserved": torch.cuda.memory_reserved(),
                "peak_allocated": torch.cuda.max_memory_allocated(),
                "peak_reserved": torch.cuda.max_memory_reserved(),
                "segments": [segment["address"] for segment in torch.cuda.memory_snapshot()],
            }
        )
    return said


class Following(CachingAllocator):
    """Puts a new segment where the driver put it."""

    there = 0

    def _place(self, nbytes: int) -> int:
        return self.there


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_simulation_is_the_allocator_to_the_byte(seed, expandable):
    settings = f"expandable_segments:{expandable}"
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": settings, "PYTORCH_ALLOC_CONF": settings}
    run = subprocess.run([sys.executable, __file__, str(seed)], env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout)
    simulated = CachingAllocator(expandable=True) if expandable else Following()
    bases: dict[bool, int] = {}  # a segment that grows stays where it is as long as any of it is used: addresses count from there
    known: set[int] = set()
    for (key, nbytes), real in zip(changes(seed), said, strict=True):
        if isinstance(simulated, Following):
            simulated.there = next(iter(set(real["segments"]) - known), 0)
            known = set(real["segments"])
        if key == EMPTY:
            simulated.empty_cache()
            if expandable:
                bases = {}
        elif nbytes:
            simulated.allocate(key, nbytes)
            address = simulated.address(key)
            assert address is not None
            small = nbytes <= MIB
            base = bases.setdefault(small, real["address"] - address) if expandable else 0
            assert address == real["address"] - base
        else:
            simulated.free(key)
        assert simulated.allocated_bytes == real["allocated"]
        assert simulated.reserved_bytes == real["reserved"]
        assert simulated.peak_allocated_bytes == real["peak_allocated"]
        assert simulated.peak_reserved_bytes == real["peak_reserved"]


if __name__ == "__main__":
    print(json.dumps(play(int(sys.argv[1]))))
