"""A rank of test_zero: what it holds in memory, or on a disk.

torchrun --nproc-per-node N zero_state.py memory|disk
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fw.assemble import assemble
from fw.config import load
from fw.launching.membership import join, leave
from fw.recipe import current_world, resolve
from fw.recipe.world import World

CPU = torch.device("cpu")
SIZES = ["model.hidden_size=512", "model.num_attention_heads=8", "model.num_key_value_heads=8"]
ZERO = ["sharding.name=zero", "sharding.stage=3"]
ALL_DIVIDED = ["sharding.stage3_param_persistence_threshold=0", "sharding.reduce_bucket_size=1"]


def held_bytes() -> int:
    """Of the storages of all tensors alive."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = [o for o in gc.get_objects() if isinstance(o, torch.Tensor) and o.device.type == "cpu" and o.layout == torch.strided]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def step(stepper, ids, micro_batches=1):
    """One step over ``micro_batches``; the loss, as one process would compute it, and the norm before clipping."""
    loss = 0.0
    for number in range(micro_batches):
        with stepper.micro_batch(number == micro_batches - 1), stepper.forward_context():
            logits = stepper.module(ids[number : number + 1, :-1]).float()
            part = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[number, 1:]) / 4
            stepper.backward(part)
        loss += part.detach()
    return loss, float(stepper.step(1.0).grad_norm)


def memory(mesh, world) -> None:
    held = {}
    for precision in ("fp32", "bf16"):
        sizes = ["model.intermediate_size=1024", "model.num_hidden_layers=2", f"precision={precision}"]
        recipe = resolve(load("tiny.yaml", [*SIZES, *sizes, *ZERO, *ALL_DIVIDED]), world)
        before = held_bytes()
        made = assemble(recipe, 258, mesh, CPU)
        for _ in range(2):
            step(made.stepper, torch.zeros(1, 9, dtype=torch.int64))
        held[precision] = held_bytes() - before
        del made
    Path(f"rank{world.rank}-of-{world.size}.json").write_text(json.dumps(held))


def disk(mesh, world) -> None:
    """A rank's part of the largest matrices must come to DeepSpeed's least size of a file, 1 MiB."""
    sizes = [*SIZES, "model.intermediate_size=2048", "model.num_hidden_layers=1", "train.global_batch_size=4", "train.micro_batch_size=1"]
    offload = ["offload={optimizer: nvme, params: nvme, path: files}", "sharding.param_max_in_cpu=1", "optimizer.lr=1e-4"]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(256, (10, 4, 17), generator=generator)
    for precision, tolerance in (("fp32", 1e-5), ("bf16", 2e-2)):
        common = [*sizes, f"precision={precision}", "optimizer.lr=1e-4"]
        alone = assemble(resolve(load("tiny.yaml", [*common, "sharding=single"]), World()), 258, None, CPU).stepper
        divided = assemble(resolve(load("tiny.yaml", [*common, *ZERO, *offload]), world), 258, mesh, CPU).stepper
        parts = ids.chunk(world.size, dim=1)[world.rank]
        for number in range(10):
            loss, norm = step(divided, parts[number], 2)
            dist.all_reduce(loss)
            expected, expected_norm = step(alone, ids[number], 4)
            assert abs(float(loss - expected)) <= tolerance * float(expected), (precision, number, loss, expected)
            assert abs(norm - expected_norm) <= tolerance * expected_norm, (precision, number, norm, expected_norm)
        assert norm > 1.0, "clipping must be active for this to test it"
        files = list(Path("files").rglob(f"rank{world.rank}/*.swp"))
        kinds = {path.parent.parent.name for path in files}
        assert {"optimizer", f"{'float32' if precision == 'fp32' else 'bfloat16'}params"} <= kinds, kinds
        on_disk = sum(path.stat().st_size for path in files)
        large = 2 * 2048 * 512 // world.size
        assert on_disk > large * 12, on_disk
        whole = dict(alone.weights())
        for name, tensor in divided.weights().items():
            piece = tensor.piece()
            if piece is not None:
                assert (piece.read() - whole[name].reshape(-1)[piece.where]).abs().max() < 1e-3, name
        dist.barrier()
        divided.close()
        dist.barrier()
        assert not list(Path("files").iterdir())


def main() -> None:
    join("gloo")
    world = current_world()
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("shard",))
    if sys.argv[1] == "memory":
        memory(mesh, world)
    else:
        disk(mesh, world)
    leave()


main()
