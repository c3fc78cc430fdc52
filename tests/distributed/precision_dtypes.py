"""A rank that makes a step in every precision under every division, and tells which dtypes weights, gradients and state have; and why
DeepSpeed is refused another compute dtype.

torchrun --nproc-per-node N precision_dtypes.py '{"cell": ["override", …], …}'
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fw.assemble import assemble
from fw.config import load
from fw.launching.membership import join, leave
from fw.recipe import current_world, resolve

if current_world().launched:
    join("gloo")
grads: set[torch.dtype] = set()
register_optimizer_step_pre_hook(
    lambda optimizer, *_: grads.update(p.grad.dtype for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
)


def named(dtypes: set[torch.dtype]) -> list[str]:
    return sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)


found = {}
for name, overrides in json.loads(sys.argv[1]).items():
    recipe = resolve(load("tiny.yaml", overrides), current_world())
    shape = recipe.mesh_shape
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape)) if shape else None
    made = assemble(recipe, 258, mesh, torch.device("cpu"))
    made.model.train()
    ids = torch.arange(64).view(2, 32)
    seen: set[torch.dtype] = set()
    handle = made.model.blocks[0].mlp.down_proj.register_forward_hook(lambda _, args, out, seen=seen: seen.add(out.dtype))
    grads.clear()
    with made.stepper.micro_batch(True), made.stepper.forward_context():
        loss = recipe.objective.loss_sum(made.stepper.module, {"input_ids": ids, "labels": ids}) / 64
    made.stepper.backward(loss)
    made.stepper.step(1.0)
    found[name] = {
        "weights": named({tensor.dtype for tensor in made.stepper.weights().values()}),
        "gradients": named(grads),
        "state": named({tensor.dtype for key, tensor in made.stepper.optimizer_tensors().items() if not key.endswith("/step")}),
        "compute": named(seen),
    }
    if recipe.names["sharding"] == ("zero",):  # what forward sees is stored, and a step copies into it
        found[name]["forward"] = named({parameter.dtype for _, parameter in made.stepper.parameters()})
if not dist.is_initialized() or dist.get_rank() == 0:
    print(json.dumps(found))
leave()
