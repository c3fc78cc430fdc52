"""A rank that looks at what options of ddp and fsdp change: collectives, where gradients live, what is gathered ahead.

torchrun --nproc-per-node 2 options.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from fw.assemble import Assembly, assemble
from fw.config import load
from fw.launching.membership import join, leave
from fw.recipe import Recipe, current_world, resolve

SHAPE = ["model.hidden_size=256", "model.intermediate_size=512", "model.num_hidden_layers=4"]
BLOCKS = 4


def two_micro_batches(recipe: Recipe, made: Assembly, ids: torch.Tensor) -> None:
    for number, part in enumerate(ids):
        batch = {"input_ids": part, "labels": part}
        with made.stepper.micro_batch(number == 1), made.stepper.forward_context():
            made.stepper.backward(recipe.objective.loss_sum(made.stepper.module, batch) / 128)


def run(sharding: str) -> tuple[Assembly, dict[str, int], list[float]]:
    """Two micro-batches: the assembly with its gradients, collectives by name, and the gradient's norm."""
    recipe = resolve(load("tiny.yaml", [f"sharding={sharding}", *SHAPE]), current_world())
    mesh = init_device_mesh("cpu", tuple(recipe.mesh_shape.values()), mesh_dim_names=tuple(recipe.mesh_shape))
    made = assemble(recipe, 258, mesh, torch.device("cpu"))
    made.model.train()
    ids = torch.arange(64).view(2, 1, 32) + 50 * dist.get_rank()
    two_micro_batches(recipe, made, ids)  # ddp forms its buckets in the first backward
    made.model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU]) as counted:
        two_micro_batches(recipe, made, ids)
    calls = {event.key: event.count for event in counted.key_averages() if event.key.startswith("c10d::")}
    grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in made.model.parameters()]
    return made, calls, [float(grad.norm()) for grad in grads]


def calls_of(calls: dict[str, int], what: str) -> int:
    return sum(number for name, number in calls.items() if what in name.replace("_", ""))


join("gloo")
made, plain, norms = run("ddp")
reduces = calls_of(plain, "allreduce")
assert any(p.grad.untyped_storage().nbytes() > p.grad.nbytes for p in made.model.parameters()), "gradients are views of buckets"
made, small, same = run("{name: ddp, bucket_mb: 1}")
assert calls_of(small, "allreduce") > reduces, (plain, small)
made, copies, _ = run("{name: ddp, gradient_as_bucket_view: false}")
assert all(p.grad.untyped_storage().nbytes() == p.grad.nbytes for p in made.model.parameters()), "gradients have memory of their own"
made, static, same_again = run("{name: ddp, static_graph: true}")
assert calls_of(static, "allreduce") >= 2 * reduces, "a static graph reduces after every micro-batch"
for other in (same, same_again):
    assert all(abs(a - b) < 1e-5 * max(a, 1e-3) for a, b in zip(norms, other, strict=True))

_, twice, sharded = run("fsdp")
made, once, kept = run("{name: fsdp, reshard_after_forward: false}")
assert calls_of(twice, "allgather") - calls_of(once, "allgather") == 2 * BLOCKS, (twice, once)
for other in (sharded, kept):
    assert all(abs(a - b) < 1e-5 * max(a, 1e-3) for a, b in zip(norms, other, strict=True))
made, _, _ = run("{name: fsdp, forward_prefetch: 2, backward_prefetch: 3}")
states = [block._get_fsdp_state() for block in made.model.blocks]
assert [len(state._states_to_forward_prefetch) for state in states] == [2, 2, 1, 0]
assert [len(state._states_to_backward_prefetch) for state in states] == [0, 1, 2, 3]
assert states[3]._states_to_backward_prefetch[0] is states[2], "the next one in backward first"
leave()
