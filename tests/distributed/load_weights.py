"""A rank of test_loading_memory: load a model directory and print by how much private and shared memory grew at most.

[torchrun --nproc-per-node N] load_weights.py DIRECTORY DTYPE
"""

from __future__ import annotations

import json
import re
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fw
from fw.assemble import assemble
from fw.config import load
from fw.launching.membership import join, leave
from fw.recipe import current_world, resolve


def resident() -> int:
    """RssAnon + RssShmem in bytes: what is not backed by a file."""
    status = Path("/proc/self/status").read_text()
    return sum(int(kib) for kib in re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", status)) * 1024


class Peak(threading.Thread):
    """The most that was resident while it ran."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_bytes = self.peak_bytes = resident()
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.002):
            self.peak_bytes = max(self.peak_bytes, resident())


def main() -> None:
    path, dtype = sys.argv[1], sys.argv[2]
    world = current_world()
    mesh = None
    recipe = resolve(
        load("tiny.yaml", [f"model={{name: auto, path: {path}}}", f"sharding={'fsdp' if world.size > 1 else 'single'}"]), world
    )
    torch.zeros(8, 8) @ torch.zeros(8, 8)  # threads and their arenas are there
    if world.size > 1:
        join("gloo")
        mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("shard",))
        dist.barrier()
    peak = Peak()
    peak.start()
    if world.size > 1:
        made = assemble(recipe, recipe.model.vocab_size, mesh, torch.device("cpu")).model
        kept = sum(p.to_local().nbytes for p in made.parameters())
    else:
        made = fw.load_model(path, dtype=getattr(torch, dtype))
        kept = sum(p.nbytes for p in made.parameters())
    growth = max(peak.peak_bytes, resident()) - peak.start_bytes
    peak.done.set()
    Path(f"rank{world.rank}.json").write_text(json.dumps({"growth": growth, "kept": kept}))
    leave()


main()
