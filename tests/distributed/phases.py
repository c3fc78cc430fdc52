"""A rank that prints, as JSON, what it takes from the allocator to be assembled, anew and from a checkpoint, to validate, and to copy what
a checkpoint holds.

torchrun --nproc-per-node N phases.py CONFIG CHECKPOINT [OVERRIDE ...]
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fw.assemble import Assembly, assemble
from fw.checkpointing.ranks import GlooRanks, OneRank
from fw.checkpointing.staging import Stage
from fw.config import load
from fw.launching.membership import join, leave
from fw.meter.account import History, Rules
from fw.meter.allocations import allocations
from fw.meter.step_memory import RULES
from fw.place import place
from fw.recipe import current_world, resolve
from fw.training.inputs import open_data, say_nothing
from fw.training.loading import loader
from fw.training.snapshot import tensors

T = TypeVar("T")
CPU = torch.device("cpu")
config, checkpoint, *overrides = sys.argv[1:]
several = int(os.environ.get("WORLD_SIZE", "1")) > 1
if several:
    join("gloo")
recipe = resolve(load(config, overrides), current_world())
mesh = init_device_mesh("cpu", tuple(recipe.mesh_shape.values()), mesh_dim_names=tuple(recipe.mesh_shape)) if several else None
recipe.sharding.prepare(recipe.step_spec(CPU), lambda text: None)
reader = recipe.checkpoint.open(place(Path(checkpoint)))


# With rules the profiler keeps an eye on every tensor, and FSDP2, assembling, refuses to give such a one storage; without, frees by gloo
# go unseen.
of_assembling = None if recipe.names["sharding"][0] == "fsdp" else RULES
files = {file.stat().st_size for file in Path(checkpoint).glob("*.safetensors")}


def taken(make: Callable[[], T], rules: Rules | None = of_assembling) -> tuple[int, T]:
    with allocations(CPU, rules) as found:
        made = make()
    # Files that are mapped are told of like memory, and are none of the process's own.
    own = [(block, sign) for block, sign in found.history.changes if block.nbytes not in files]
    return History(changes=own).account().peak_bytes, made


@torch.no_grad()
def validate(made: Assembly) -> None:
    """As training does, all of it."""
    replica = recipe.replicas * found["rank"] // recipe.world_size
    made.stepper.module.eval()
    with made.stepper.evaluation():
        for (micro,), _ in loader(batches.val, batches.val_plans(replica), recipe.loader, CPU):
            batch = recipe.sharding.local_batch(micro, mesh)
            del micro
            with made.stepper.forward_context():
                recipe.objective.loss_sum(made.stepper.module, batch)


found = {"rank": dist.get_rank() if several else 0}
found["load"], made = taken(lambda: assemble(recipe, 257, mesh, CPU))
made.stepper.close()
found["resume"], made = taken(lambda: assemble(recipe, 257, mesh, CPU, reader))
_, batches, _ = open_data(recipe, say_nothing)
found["validate"], _ = taken(lambda: validate(made), RULES)
ranks = GlooRanks(timedelta(seconds=60)) if several else OneRank()
found["copies"] = Stage(ranks).reserve(tensors(made))
os.write(sys.stdout.fileno(), (json.dumps(found) + "\n").encode())
if several:
    leave()
os._exit(0)
