"""A rank's training step, run without the bytes."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fw.assemble import Assembly, Built, build
from fw.errors import RunError
from fw.kinds.data import Rows
from fw.launching.membership import join, leave
from fw.meter.account import History, Recorder, Rules
from fw.meter.devices import Device
from fw.meter.step_memory import RULES, Recording, StepMemory, StepMeter
from fw.planning import around_steps
from fw.planning.expand import NotRepeatable
from fw.planning.host_speed import threads_of
from fw.planning.ledger import Ledger
from fw.planning.repeat import Repetition
from fw.planning.saving import Saved, saved
from fw.recipe import Recipe
from fw.training.forward_backward import forward_backward
from fw.training.rng import GeneratorStates
from fw.training.snapshot import tensors as checkpoint_tensors

TRACED = torch.device("cpu")
"""What fake tensors say they are on: a torch without CUDA cannot trace on any other device."""


@dataclass(frozen=True)
class RankTrace:
    """What a rank will take.

    Attributes:
        loaded_bytes: once the model has its weights, before the first step.
        steps: from the second on; every later one is like one of them.
        left_out: blocks that others stood for.
        histories: of all steps, the first included.
        repeated: for each micro-batch of a history, how many of a step are like it.
        groups: ranks that exchange something on a GPU with this one.
        host_bytes: the most in host memory, beside a GPU's.
        load: components at the peak, until the model has its weights.
        read_bytes: of files, for that.
        resume: components at the peak of going on from a checkpoint; None where the run writes none, or that is not known.
        save: the same of a save, and what it takes besides.
        validate: components at the peak of a validation; None where the run makes none.
    """

    loaded_bytes: int
    steps: Sequence[StepMemory]
    load: Mapping[str, int]
    left_out: int = 0
    histories: Sequence[History] = ()
    repeated: Sequence[int] = ()
    groups: Set[tuple[int, ...]] = field(default_factory=frozenset)
    host_bytes: int = 0
    read_bytes: int = 0
    resume: Mapping[str, int] | None = None
    save: tuple[Mapping[str, int], Saved] | None = None
    validate: Mapping[str, int] | None = None


def trace_rank(
    recipe: Recipe,
    rank: int,
    vocab_size: int,
    rows: Rows,
    micro_batches: Sequence[dict[str, Tensor]],
    device: Device | None = None,
    costs: bool = False,
    validation: Mapping[str, Tensor] | None = None,
) -> RankTrace:
    """Assemble and run two steps as this rank, without bytes, values or other ranks.

    Args:
        vocab_size: rows of the embedding.
        rows: of the data.
        micro_batches: of a step, as this rank's replica reads them; only shapes and dtypes matter.
        device: GPU that the step runs on; None for the CPU.
        costs: whether histories are to know what operators cost on the CPU, too.
        validation: the largest micro-batch of a validation; None where the run makes none.
    """
    given = (recipe, rank, vocab_size, rows, micro_batches, device, costs, validation)
    try:
        return trace_blocks(*given, whole=False)
    except Exception:  # whatever a model says where blocks are missing; if it is at fault, it says so again
        return trace_blocks(*given, whole=True)


def trace_blocks(
    recipe: Recipe,
    rank: int,
    vocab_size: int,
    rows: Rows,
    micro_batches: Sequence[dict[str, Tensor]],
    device: Device | None = None,
    costs: bool = False,
    validation: Mapping[str, Tensor] | None = None,
    *,
    whole: bool,
) -> RankTrace:
    """The same, with every block or with as few as stand for all.

    Raises:
        NotRepeatable: blocks that look alike are not.
    """
    runs_on = TRACED if device is None else torch.device("cuda")
    with as_rank(recipe, rank) as mesh, _quiet(), recipe.sharding.traced(recipe.step_spec(runs_on, rows)):
        built = build(recipe, vocab_size, mesh, runs_on, rows)
        again = build(recipe, vocab_size, mesh, runs_on, rows) if recipe.train.save_every else None
        built.model.train()
        local = [recipe.sharding.local_batch(dict(micro), mesh) for micro in micro_batches]
        with torch.compiler.set_stance("force_eager"), Ledger(device, costs, threads_of(recipe)) as ledger:
            made, load = around_steps.started(recipe, built, mesh, TRACED, ledger)
            ledger.ready(made.stepper.module)
            repetition = None if whole else Repetition.of(made, ledger, recipe.steps_in_backward)
            with _collected_quickly():
                loaded = ledger.live_bytes
                steps, histories = _steps(recipe, made, ledger, micro_batches, local, repetition)
                validate = None if validation is None else _validation(recipe, made, ledger, validation, mesh, micro_batches, repetition)
            left_out = 0 if repetition is None else repetition.left_out
            save = None if again is None else _save(recipe, made, ledger)
            read = around_steps.read_bytes(made.model, recipe.model.weights)
            state = around_steps.shapes(made.stepper.optimizer_tensors())
            made.stepper.close()
            del made, built, repetition  # who goes on has not begun before: what lies in the host's memory would be there twice
            resume = None if again is None else _resume(recipe, again, mesh, ledger, state)
        telling = [*_telling(local), len(local)]
        repeated = [following - number for number, following in pairwise(telling)]
        gpu = ledger.gpu
        host_bytes = 0 if gpu is None else gpu.host_peak_bytes
        groups = frozenset() if gpu is None else gpu.groups
        return RankTrace(loaded, steps, load, left_out, histories, repeated, groups, host_bytes, read, resume, save, validate)


def _steps(
    recipe: Recipe,
    made: Assembly,
    ledger: Ledger,
    read: Sequence[Mapping[str, Tensor]],
    local: Sequence[Mapping[str, Tensor]],
    repetition: Repetition | None,
) -> tuple[list[StepMemory], list[History]]:
    """The steps from the second on: those in which something may still settle, and one in each phase of precision. The histories of all.

    Raises:
        NotRepeatable: blocks that look alike are not.
    """
    stepper = made.stepper
    histories: list[History] = []
    factor = recipe.schedule.factor(0, recipe.train.max_steps)
    telling = _telling(local)
    found = []
    for number, phase in enumerate(recipe.precision.phases()):
        if number:
            stepper.change_precision(phase.policy)
            recipe.activation.change_precision()
        # Optimizer state comes with the first step, DDP's final buckets with the second; of repeated blocks two steps must agree.
        for again in range(3 if number == 0 else 1 if repetition is None else 2):
            first = number == again == 0
            whole = repetition is None or (first and repetition.steps_in_backward)
            recording = ledger.recording if repetition is None or whole else repetition.recording(again % 2)
            meter = StepMeter(stepper, made.model.blocks, TRACED, _into(histories, recording), made.beside_weights)
            batch = [_unread(micro) for micro in local]
            with ledger.on_host():
                ahead = [_unread(micro) for micro in read]  # Lightning reads a batch while the one before is computed
            generators = GeneratorStates(TRACED)  # as training has them for a step that is repeated
            with meter.step([tensor for micro in batch for tensor in micro.values()]) as measured:
                stepper.begin_step(factor)
                forward_backward(recipe.objective, stepper, [batch[n] for n in telling], 1.0, meter)
                stepper.step(factor)
            found += measured
            del batch, ahead, generators
        if repetition is not None and _sums(found[-1]) != _sums(found[-2]):
            raise NotRepeatable("a step with more blocks is not what fewer say")
    return found[1:], histories


def _validation(
    recipe: Recipe,
    made: Assembly,
    ledger: Ledger,
    micro: Mapping[str, Tensor],
    mesh: DeviceMesh | None,
    train: Sequence[Mapping[str, Tensor]],
    repetition: Repetition | None,
) -> Mapping[str, int]:
    """Components at the peak of a validation, after the last step.

    Args:
        micro: of it, as this rank's replica reads it.
        train: batches of training, of which one is read ahead.

    Raises:
        NotRepeatable: blocks that look alike are not.
    """
    stepper = made.stepper
    stepper.module.eval()
    found: list[StepMemory] = []
    for more in range(1 if repetition is None else 2):
        recording = ledger.recording if repetition is None else repetition.recording(more)
        meter = StepMeter(stepper, made.model.blocks, TRACED, recording, made.beside_weights)
        batch = _unread(recipe.sharding.local_batch(dict(micro), mesh))
        with ledger.on_host():
            ahead = [_unread(each) for each in (*train, micro)]
        with meter.step([*batch.values()]) as measured, torch.no_grad(), stepper.evaluation():
            meter.forward()
            with stepper.forward_context():
                recipe.objective.loss_sum(stepper.module, batch)
        found += measured
        del batch, ahead
    stepper.module.train()
    if _sums(found[0]) != _sums(found[-1]):
        raise NotRepeatable("a validation with more blocks is not what fewer say")
    return found[-1].at_peak


def _save(recipe: Recipe, made: Assembly, ledger: Ledger) -> tuple[Mapping[str, int], Saved]:
    """What a checkpoint after the last step takes."""
    with ledger.recording(TRACED, RULES) as found:
        around_steps.name_known(found, made)
        tensors = checkpoint_tensors(made)
        taken = saved(recipe, tensors, ledger.gpu is not None)
        del tensors
    return around_steps.highest(found.history), taken


def _resume(recipe: Recipe, built: Built, mesh: DeviceMesh | None, ledger: Ledger, state: around_steps.Shapes) -> Mapping[str, int] | None:
    """None where an engine of somebody else's cannot take state that has no bytes: its steps are planned all the same."""
    try:
        return around_steps.resumed(recipe, built, mesh, TRACED, ledger, state)
    except Exception:  # whatever it says of tensors that are fake
        return None


def _sums(step: StepMemory) -> tuple[Any, ...]:
    return step.peak_bytes, step.low_bytes, step.phase, step.by_category, step.most


def _into(histories: list[History], recording: Recording) -> Recording:
    """The same recording, whose history is kept."""

    @contextmanager
    def kept(device: torch.device, rules: Rules) -> Iterator[Recorder]:
        with recording(device, rules) as found:
            yield found
        histories.append(found.history)

    return kept


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
    join("fake", rank=rank, world_size=recipe.world_size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", tuple(recipe.mesh_shape.values()), mesh_dim_names=tuple(recipe.mesh_shape))
    finally:
        leave()


@contextmanager
def _collected_quickly() -> Iterator[None]:
    """Collecting garbage, as a step does before it is measured, passes over all that there is already."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch warns about where a tensor has no bytes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
