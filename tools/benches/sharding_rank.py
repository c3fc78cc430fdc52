"""A rank of the sharding bench: trains a few steps and prints what it kept, what a step took beyond that, and what it sent."""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fw.assemble import assemble
from fw.config import load
from fw.meter.memory import malloc_in_use_bytes
from fw.recipe import Recipe, current_world, resolve
from fw.training.host_allocator import give_back_freed_memory
from fw.training.strategy import leave

STEPS = 3


def resident(field: str) -> int:
    """VmRSS or VmHWM (the peak) of this process in bytes."""
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def received_by_host() -> int:
    """Bytes over the loopback device of this network namespace."""
    return int(re.search(r"lo:\s*(\d+)", Path("/proc/net/dev").read_text())[1])


def steps(recipe: Recipe, count: int) -> tuple[int, int]:
    """Train; the largest growth of resident memory within a step, and bytes all ranks sent in the last."""
    shape = recipe.mesh_shape
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    made = assemble(recipe, 258, mesh, torch.device("cpu"))
    made.model.train()
    length = recipe.train.sequence_length
    batch = recipe.sharding.local_batch({name: torch.arange(length)[None] % 250 for name in ("input_ids", "labels")}, mesh)
    grown = sent = 0
    for _ in range(count):
        gc.collect()
        give_back_freed_memory()
        dist.barrier()
        before, passed = resident("VmRSS"), received_by_host()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what it is now
        with made.stepper.micro_batch(True), made.stepper.forward_context():
            made.stepper.backward(recipe.objective.loss_sum(made.stepper.module, batch) / length)
        grown = resident("VmHWM") - before
        made.stepper.step(1.0)
        dist.barrier()
        sent = received_by_host() - passed
    kept.append(made)
    return grown, sent


kept: list[object] = []
config, warm_up, *overrides = sys.argv[1:]
dist.init_process_group("gloo")
steps(resolve(load(config, [*overrides, *json.loads(warm_up)]), current_world()), 2)  # what the first use of anything loads
start = malloc_in_use_bytes() or 0
recipe = resolve(load(config, overrides), current_world())
grown, sent = steps(recipe, STEPS)
gc.collect()
found = {"kept": (malloc_in_use_bytes() or 0) - start, "grown": grown, "sent": sent // recipe.world_size}
if os.environ["RANK"] == "0":
    print("found", json.dumps(found), flush=True)
leave()
