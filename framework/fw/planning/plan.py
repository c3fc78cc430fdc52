"""``fw plan``: what a run will take, before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fw import config as configuration
from fw.assemble import check
from fw.config import Config, LoaderSection
from fw.errors import UserError
from fw.kinds.data import Say
from fw.meter.detail import Detail
from fw.meter.devices import Device, find, of_product, on_device
from fw.meter.document import MemoryDocument, RankMemory
from fw.meter.memory import held_bytes, host_memory
from fw.meter.speeds import Speeds
from fw.planned import planning_for
from fw.planning.alike import ranks_alike
from fw.planning.on_gpu import check_plannable, on_gpu, slowest_step
from fw.planning.phases import with_phases
from fw.planning.trace import trace_rank
from fw.recipe import Recipe, current_world, resolve
from fw.training.batches import Batches, Plan, Source
from fw.training.inputs import open_data, say
from fw.training.loading import loader

CPU = "cpu"

_PER_HOST = 8
"""Ranks of a host where nobody says, and that many divide the world."""


def plan(config: str | Path | Config, *overrides: str, world_size: int | None = None, device: str | None = None) -> MemoryDocument:
    """Predict what each rank of a training run takes, without a GPU, weights, or other processes.

    Args:
        config: a YAML file, or a config that is loaded already (then without overrides).
        overrides: ``key=value``, as on the command line.
        world_size: ranks; by ``launch`` where None.
        device: ``cpu``, a GPU of :data:`fw.meter.devices.DEVICES`, or the path of a YAML file that describes one. What the run would
            compute on here where None.

    Raises:
        UserError: the config is wrong, as it would be for training, or the device, or a plugin cannot be planned.
    """
    chosen = None if device is None or device == CPU else find(device, CPU)
    recipe = resolve(loaded(config, overrides, world_size), current_world(), starts=False)
    return plan_recipe(recipe, device_of(recipe, say) if device is None else chosen)


def plan_recipe(recipe: Recipe, gpu: Device | None, speeds: Speeds | None = None, tell: Say = say) -> MemoryDocument:
    """The same of a recipe.

    Args:
        gpu: what ranks compute on; None for the CPU.
        speeds: of the CPU, for an estimate of the time a step takes; without them none is made.
        tell: takes what there is to say of the data.

    Raises:
        UserError: the recipe does not fit its data or the device, or a plugin cannot be planned.
    """
    with planning_for(on_device(gpu)) if gpu is not None else nullcontext():
        return _plan(recipe, gpu, speeds, tell)


def _plan(recipe: Recipe, gpu: Device | None, speeds: Speeds | None, tell: Say) -> MemoryDocument:
    _, batches, vocab_size = open_data(recipe, tell)
    if gpu is not None:
        check_plannable(recipe)
    check(recipe, vocab_size, torch.device(CPU if gpu is None else "cuda"), batches.rows, is_here=gpu is None)
    micro_batches, validation = largest_step(batches), largest_validation(batches)
    imported = held_bytes(torch.device(CPU)) or 0  # what a process with the same libraries holds before it has a model
    alike = ranks_alike(recipe, vocab_size, batches.rows)
    costs = speeds is not None
    traces = {
        rank: trace_rank(recipe, rank, vocab_size, batches.rows, micro_batches, gpu, costs, validation) for rank in sorted(set(alike))
    }
    ranks = {}
    for rank, trace in traces.items():
        if gpu is not None:
            ranks[rank] = on_gpu(rank, trace, gpu, imported)
            continue
        found = RankMemory.of_steps(rank, trace.steps, imported)
        ranks[rank] = replace(found, host_peak=imported + found.allocated_peak)
    per_rank = [with_phases(replace(ranks[like], rank=rank), traces[like]) for rank, like in enumerate(alike)]
    most = host_memory() // recipe.ranks_per_host if gpu is None else gpu.memory_bytes
    budget = recipe.memory.budget_bytes or most
    budget = budget if gpu is None else min(budget, most)  # a device's bytes are fewer than its name says
    bound = gpu or speeds
    seconds = None if bound is None else max(slowest_step(trace, bound, recipe.ranks_per_host) for trace in traces.values())
    document = MemoryDocument(recipe.config.name, CPU if gpu is None else gpu.name, recipe.world_size, budget, per_rank, seconds)
    highest = max(traces[alike[document.largest.rank]].steps, key=lambda step: step.peak_bytes)
    return replace(document, detail=Detail(document.largest.rank, highest.parameters, highest.timeline, highest.modules))


def device_of(recipe: Recipe, tell: Say) -> Device | None:
    """The GPU that the run would compute on, with its own memory; None for the CPU, and for a GPU that is not known, which is told."""
    if recipe.launch.accelerator == "cpu" or not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    known = of_product(name)
    if known is None:
        tell(
            f"warning: {name} is none of the GPUs that fw knows, so what is planned is what a CPU would take, without a GPU's context,"
            " caching allocator and kernels; fw plan --device FILE.yaml plans for one that you describe"
        )
    return None if known is None else replace(known, memory_bytes=torch.cuda.get_device_properties(0).total_memory)


def loaded(config: str | Path | Config, overrides: Sequence[str], world_size: int | None) -> Config:
    given = [*overrides, *([] if world_size is None else _launch(config, overrides, world_size))]
    return config if isinstance(config, Config) else configuration.load(config, given)


def _launch(config: str | Path | Config, overrides: Sequence[str], world_size: int) -> list[str]:
    """The overrides that make so many ranks."""
    if isinstance(config, Config):
        raise UserError("plan: world_size is for a file; load the config with launch.devices and launch.nodes")
    if world_size < 1:
        raise UserError(f"--world-size: {world_size} is too small; the least is 1")
    loaded = configuration.load(config, overrides)
    asked = loaded.tree.get("launch") or {}
    devices = asked.get("devices") if isinstance(asked, dict) else None
    per_host = devices if isinstance(devices, int) and devices > 1 else _PER_HOST
    per_host = per_host if world_size % per_host == 0 else world_size
    return [f"launch.devices={per_host}", f"launch.nodes={world_size // per_host}"]


def largest_step(batches: Batches) -> list[dict[str, Tensor]]:
    """The micro-batches of a step whose largest is the largest of an epoch."""
    plans = iter(batches.train_plans(0, 0))
    chosen = next(plans)
    if batches.rows.vary:
        steps = max(1, -(-len(batches.train.samples) // batches.recipe.train.global_batch_size))  # the last of an epoch ends in the next
        chosen = max(
            [chosen, *(plan for _, plan in zip(range(1, steps), plans, strict=False))],
            key=lambda plan: max(_tokens(batches, indices) for indices in plan.micro_batches),
        )
    return _read(batches.train, chosen)


def largest_validation(batches: Batches) -> dict[str, Tensor] | None:
    """The largest micro-batch of a validation; None where the run makes none."""
    if not batches.recipe.train.val_every:
        return None
    (largest,) = _read(batches.val, next(iter(batches.val_plans(0))))  # who divides them gives it to the first replica, first
    return largest


def _read(source: Source, plan: Plan) -> list[dict[str, Tensor]]:
    read: list[dict[str, Tensor]] = next(iter(loader(source, [plan], LoaderSection(), torch.device("cpu")))).micro_batches
    return read


def _tokens(batches: Batches, indices: Sequence[int]) -> int:
    return len(indices) * max((int(batches.train.padded(slice(i, i + 1))[0]) for i in indices), default=0)
