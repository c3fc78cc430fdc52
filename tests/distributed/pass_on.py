"""A rank of test_resharding: takes checkpoints of other divisions, writes each once more as it is, and trains five steps from it.

torchrun --nproc-per-node N pass_on.py '{"train": {"cell": ["override", …]}, "from": {"cell": "directory"}, "to": {"cell": […]}}'
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fw
from fw.assemble import assemble
from fw.checkpointing.ranks import GlooRanks, OneRank
from fw.config import load
from fw.kinds.checkpoint import Part, Snapshot, parts
from fw.launching.membership import leave
from fw.place import place
from fw.recipe import current_world, resolve
from fw.training.strategy import MeshStrategy

STEP = 5


def write_again(name: str, overrides: list[str], source: str) -> None:
    """Into the division and out of it, with nothing in between."""
    world = current_world()
    recipe = resolve(load("tiny.yaml", overrides), world)
    shape = recipe.mesh_shape
    MeshStrategy(world, shape, torch.device("cpu"), 60, 60).join()
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape)) if shape and dist.is_initialized() else None
    reader = recipe.checkpoint.open(place(source))
    made = assemble(recipe, 257, mesh, torch.device("cpu"), reader)
    weights = {**{n: t.detach() for n, t in made.model.stored().items()}, **made.stepper.weights()}
    optimizer = {path: Part(tensor) for path, tensor in made.stepper.optimizer_tensors().items()}
    snapshot = Snapshot(STEP, {"model": parts(made.model, weights), "optimizer": optimizer}, {}, reader.state(), lambda path: None)
    ranks = GlooRanks(timedelta(seconds=60)) if world.size > 1 else OneRank()
    recipe.checkpoint.save(place(name), snapshot, ranks)
    made.stepper.close()
    leave()


def main() -> None:
    asked = json.loads(sys.argv[1])
    for cell, overrides in asked["train"].items():
        words = [*overrides, f"train.run_dir={cell}", f"train.save_every={STEP}", f"train.max_steps={STEP}", "schedule.total_steps=40"]
        assert fw.train("tiny.yaml", *words).exit_code == 0
    for before, source in asked["from"].items():
        for after, overrides in asked["to"].items():
            name = f"{before}-{after}"
            more = [f"train.run_dir={name}", f"train.max_steps={2 * STEP}", "train.save_every=0", f"resume={source}"]
            assert fw.train("tiny.yaml", *overrides, *more).exit_code == 0, name
            write_again(f"{name}/again", overrides, source)


main()
