"""A rank's training step, run without the bytes."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fw.assemble import Assembly, build, start
from fw.errors import RunError
from fw.kinds.data import Rows
from fw.meter.step_memory import StepMemory, StepMeter
from fw.planning.ledger import Ledger
from fw.recipe import Recipe
from fw.training.forward_backward import forward_backward
from fw.training.rng import GeneratorStates

TRACED = torch.device("cpu")
"""What fake tensors say they are on: a torch without CUDA cannot trace on any other device."""


@dataclass(frozen=True)
class RankTrace:
    """What a rank will take.

    Attributes:
        loaded_bytes: once the model has its weights, before the first step.
        steps: from the second on; every later one is like one of them.
    """

    loaded_bytes: int
    steps: Sequence[StepMemory]


def trace_rank(recipe: Recipe, rank: int, vocab_size: int, rows: Rows, micro_batches: Sequence[dict[str, Tensor]]) -> RankTrace:
    """Assemble and run two steps as this rank, without bytes, values or other ranks.

    Args:
        vocab_size: rows of the embedding.
        rows: of the data.
        micro_batches: of a step, as this rank's replica reads them; only shapes and dtypes matter.
    """
    with as_rank(recipe, rank) as mesh, _quiet(), recipe.sharding.traced(recipe.step_spec(TRACED, rows)):
        built = build(recipe, vocab_size, mesh, TRACED, rows)
        built.model.train()
        local = [recipe.sharding.local_batch(dict(micro), mesh) for micro in micro_batches]
        with torch.compiler.set_stance("force_eager"), Ledger() as ledger:
            made = start(recipe, built, mesh, TRACED, lambda tensors: None)
            ledger.ready(made.stepper.module)
            gc.collect()
            loaded = ledger.live_bytes
            steps = _steps(recipe, made, ledger, micro_batches, local)
            made.stepper.close()
        return RankTrace(loaded, steps)


def _steps(
    recipe: Recipe, made: Assembly, ledger: Ledger, read: Sequence[Mapping[str, Tensor]], local: Sequence[Mapping[str, Tensor]]
) -> list[StepMemory]:
    """The steps from the second on: those in which something may still settle, and one in each phase of precision."""
    stepper = made.stepper
    meter = StepMeter(stepper, made.model.blocks, TRACED, ledger.recording)
    factor = recipe.schedule.factor(0, recipe.train.max_steps)
    telling = _telling(local)
    found = []
    for number, phase in enumerate(recipe.precision.phases()):
        if number:
            stepper.change_precision(phase.policy)
            recipe.activation.change_precision()
        for _ in range(3 if number == 0 else 1):  # optimizer state comes with the first, DDP's final buckets with the second
            batch = [_unread(micro) for micro in local]
            ahead = [_unread(micro) for micro in read]  # Lightning reads a batch while the one before is computed
            generators = GeneratorStates(TRACED)  # as training has them for a step that is repeated
            with meter.step([tensor for micro in batch for tensor in micro.values()]) as measured:
                stepper.begin_step(factor)
                forward_backward(recipe.objective, stepper, [batch[n] for n in telling], 1.0, meter)
                stepper.step(factor)
            found += measured
            del batch, ahead, generators
    return found[1:]


def _unread(micro: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in micro.items()}


def _telling(micro_batches: Sequence[Mapping[str, Tensor]]) -> list[int]:
    """Those to compute. Of several alike one after another the first has no gradients yet, the second does what others do, and the last
    ends the step."""
    shapes = [{name: tensor.shape for name, tensor in micro.items()} for micro in micro_batches]
    last = len(shapes) - 1
    return [n for n in range(len(shapes)) if n < 2 or n == last or not shapes[n - 2] == shapes[n - 1] == shapes[n]]


@contextmanager
def as_rank(recipe: Recipe, rank: int) -> Iterator[DeviceMesh | None]:
    """The mesh as this rank sees it; nobody answers.

    Raises:
        RunError: this process is one of several ranks.
    """
    if not recipe.mesh_shape:
        yield None
        return
    if dist.is_initialized():
        raise RunError("a plan is made before ranks meet, and this process is in a process group")
    dist.init_process_group("fake", rank=rank, world_size=recipe.world_size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", tuple(recipe.mesh_shape.values()), mesh_dim_names=tuple(recipe.mesh_shape))
    finally:
        dist.destroy_process_group()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch warns about where a tensor has no bytes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
