"""A rank that compares the initial weights under each sharding given with those of one process.

torchrun --nproc-per-node N initial_weights.py SHARDING ...
"""

from __future__ import annotations

import sys

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fw.assemble import assemble
from fw.config import load
from fw.launching.membership import join, leave
from fw.recipe import World, current_world, resolve

CPU = torch.device("cpu")
VOCABULARY = 259  # does not divide evenly
alone = dict(assemble(resolve(load("tiny.yaml", []), World()), VOCABULARY, None, CPU).stepper.parameters())
join("gloo")
for sharding in sys.argv[1:]:
    recipe = resolve(load("tiny.yaml", [f"sharding={sharding}"]), current_world())
    mesh = init_device_mesh("cpu", tuple(recipe.mesh_shape.values()), mesh_dim_names=tuple(recipe.mesh_shape))
    divided = dict(assemble(recipe, VOCABULARY, mesh, CPU).stepper.parameters())
    assert divided.keys() == alone.keys()
    for name, parameter in divided.items():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        assert torch.equal(whole, alone[name]), (sharding, name)
leave()
