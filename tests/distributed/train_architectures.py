"""A rank of test_architectures: every model directory given trains three steps on one rank and under fsdp, its layers or its sequences
divided too where the model knows how, and is written from there.

torchrun --nproc-per-node 2 train_architectures.py DIRECTORY ...
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fw.assemble import Assembly, assemble, check
from fw.checkpointing.ranks import GlooRanks
from fw.config import load
from fw.kinds.checkpoint import Part, Snapshot, parts
from fw.kinds.data import IGNORED
from fw.launching.membership import join, leave
from fw.place import place
from fw.pretrained.load import write_json
from fw.recipe import Recipe, World, current_world, resolve

STEPS = 3
CPU = torch.device("cpu")
SETTINGS = ["train.sequence_length=24", "train.micro_batch_size=1"]


def micro_batches(vocabulary: int) -> list[dict[str, torch.Tensor]]:
    """Two, with documents that share rows and with padding."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(min(vocabulary, 90), (2, 2, 24), generator=generator)
    segments = torch.tensor([1] * 9 + [2] * 12 + [0] * 3).expand(2, 2, 24)
    labels = ids.roll(-1, -1).masked_fill(segments == 0, IGNORED)
    return [{"input_ids": i, "labels": y, "segments": s} for i, y, s in zip(ids, labels, segments, strict=True)]


def train(path: str, name: str, sharding: str, world: World) -> tuple[list[float], Recipe, Assembly]:
    recipe = resolve(load("tiny.yaml", [f"model={{name: {name}, path: {path}}}", f"sharding={sharding}", *SETTINGS]), world)
    shape = recipe.mesh_shape
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape)) if shape else None
    check(recipe, recipe.model.vocab_size, CPU)
    made = assemble(recipe, recipe.model.vocab_size, mesh, CPU)
    made.model.train()
    batches = micro_batches(recipe.model.vocab_size)
    count = sum(recipe.objective.count(batch) for batch in batches)
    replica = world.rank * recipe.replicas // recipe.world_size
    mine = [recipe.sharding.local_batch(batch, mesh) for batch in batches[replica :: recipe.replicas]]
    numbers = []
    for _ in range(STEPS):
        total = torch.zeros(())
        for number, batch in enumerate(mine):
            with made.stepper.micro_batch(number == len(mine) - 1), made.stepper.forward_context():
                loss = recipe.objective.loss_sum(made.stepper.module, batch) / count
                made.stepper.backward(loss)
            total += loss.detach() / recipe.copies
        if mesh is not None:
            dist.all_reduce(total)
        numbers += [total.item(), made.stepper.step(1.0).grad_norm.item()]
    return numbers, recipe, made


def check_equal(path: str, alone: list[float], together: list[float]) -> None:
    worst = max(abs(a - b) / abs(a) for a, b in zip(alone, together, strict=True))
    assert worst < 1e-5, (path, alone, together)


def main() -> None:
    join("gloo")
    ranks = GlooRanks(timedelta(seconds=60))
    for path in sys.argv[1:]:
        name = "hf" if "hf-" in path else "auto"
        alone, _, _ = train(path, name, "single", World())
        together, recipe, made = train(path, name, "fsdp", current_world())
        check_equal(path, alone, together)
        assert alone[-2] < alone[0], "it must learn something"
        weights = parts(made.model, {n: t.detach() for n, t in made.model.stored().items()})
        kept = sum(p.to_local().nbytes for p in made.model.parameters())
        whole = sum(p.numel() * 4 for p in made.model.parameters())
        assert kept < 0.6 * whole, (path, kept, whole)

        def files(directory: Path, model=made.model) -> None:
            write_json(directory / "config.json", model.hf_config())

        if name == "auto":
            check_equal(f"{path} tensor", alone, train(path, name, "{name: fsdp, tensor: 2}", current_world())[0])
            check_equal(f"{path} context", alone, train(path, name, "{name: fsdp, context: 2}", current_world())[0])

        optimizer = {name: Part(tensor) for name, tensor in made.stepper.optimizer_tensors().items()}
        snapshot = Snapshot(STEPS, {"model": weights, "optimizer": optimizer}, {}, {}, files)
        saved = recipe.checkpoint.save(place(Path(path) / "trained"), snapshot, ranks)
        # And read again, into shards.
        before = {n: p.full_tensor().clone() for n, p in made.model.named_parameters()}
        for parameter in made.model.parameters():
            torch.nn.init.zeros_(parameter.data)
        recipe.checkpoint.open(saved).weights(made.model)(made.model.stored())
        for n, p in made.model.named_parameters():
            assert torch.equal(p.full_tensor(), before[n]), (path, n)
    leave()


main()
