"""A rank that prints, as JSON, whether the weights of embedding and head are whole when each block begins and ends, in forward and in
backward, and whether the head's gradient is already divided when the last block's backward begins.

torchrun --nproc-per-node N gathered.py CONFIG [OVERRIDE ...]
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fw.assemble import assemble
from fw.config import load
from fw.launching.membership import join, leave
from fw.recipe import current_world, resolve

join("gloo")
recipe = resolve(load(sys.argv[1], sys.argv[2:]), current_world())
mesh = init_device_mesh("cpu", tuple(recipe.mesh_shape.values()), mesh_dim_names=tuple(recipe.mesh_shape))
length = recipe.train.sequence_length
ids = torch.arange(length)[None] % 250
made = assemble(recipe, 258, mesh, torch.device("cpu"))
model: Any = made.model
model.train()
seen: dict[str, set[tuple[bool, bool]]] = {"forward": set(), "backward": set()}
reduced: list[bool] = []


def whole(module: nn.Module | None) -> bool:
    # Of tensor parallelism a gathered parameter is a DTensor, of one dimension less.
    weight = None if module is None else module.weight
    return weight is not None and not (isinstance(weight, DTensor) and "shard" in (weight.device_mesh.mesh_dim_names or ()))


def look(phase: str) -> None:
    seen[phase].add((whole(model.embed_tokens), whole(model.lm_head)))


def begins(module: nn.Module, args: Any) -> None:
    look("forward")


def ends(module: nn.Module, args: Any, output: Tensor) -> None:
    look("forward")
    last = module is model.blocks[-1]

    def back(grad: Tensor) -> None:
        look("backward")
        if last and model.lm_head is not None:
            reduced.append(isinstance(model.lm_head.weight.grad, DTensor))

    if output.requires_grad:
        output.register_hook(back)


for block in model.blocks:
    block.register_forward_pre_hook(begins)
    block.register_forward_hook(ends)
batch = recipe.sharding.local_batch({"input_ids": ids, "labels": ids}, mesh)
for _ in range(2):
    with made.stepper.micro_batch(True), made.stepper.forward_context():
        made.stepper.backward(recipe.objective.loss_sum(made.stepper.module, batch) / length)
    made.stepper.step(1.0)
found = {phase: sorted(each) for phase, each in seen.items()} | {"reduced": sorted(set(reduced))}
os.write(sys.stdout.fileno(), (json.dumps(found) + "\n").encode())
leave()
