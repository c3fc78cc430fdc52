"""A rank that prints what it keeps between two steps, parameters, gradients and optimizer state: by malloc's own count, and by the
stepper's account.

torchrun --nproc-per-node N kept_bytes.py CONFIG [OVERRIDE ...]
"""

from __future__ import annotations

import gc
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fw.assemble import Assembly, assemble
from fw.config import load
from fw.launching.membership import join, leave
from fw.meter.memory import malloc_in_use_bytes
from fw.recipe import current_world, resolve


def two_steps(overrides: list[str]) -> Assembly:
    """The second step is not finished, so that its gradients are there."""
    recipe = resolve(load(sys.argv[1], overrides), current_world())
    mesh = init_device_mesh("cpu", tuple(recipe.mesh_shape.values()), mesh_dim_names=tuple(recipe.mesh_shape))
    length = recipe.train.sequence_length
    ids = torch.arange(length)[None] % 250
    made = assemble(recipe, 258, mesh, torch.device("cpu"))
    made.model.train()
    batch = recipe.sharding.local_batch({"input_ids": ids, "labels": ids}, mesh)
    for step in range(2):
        with made.stepper.micro_batch(True), made.stepper.forward_context():
            made.stepper.backward(recipe.objective.loss_sum(made.stepper.module, batch) / length)
        if step == 0:
            made.stepper.step(1.0)
    dist.barrier()
    gc.collect()
    return made


LARGE = [
    "model.hidden_size=512",
    "model.num_hidden_layers=6",
    "model.intermediate_size=1376",
    "model.num_attention_heads=8",
    "model.num_key_value_heads=8",
]
join("gloo")
small = two_steps(sys.argv[2:])  # whatever the first use of anything loads and keeps
before = malloc_in_use_bytes() or 0
large = two_steps([*sys.argv[2:], *LARGE])
kept = large.stepper.kept()
storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in (*kept.weights, *kept.gradients, *kept.optimizer)}
by_malloc, by_account = (malloc_in_use_bytes() or 0) - before, sum(storage.nbytes() for storage in storages.values())
# The ranks share one pipe: a line is one write, where an unbuffered print would write each word by itself.
os.write(sys.stdout.fileno(), f"kept {by_malloc} {by_account}\n".encode())
leave()
