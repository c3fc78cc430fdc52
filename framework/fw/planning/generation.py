"""What generating with a model takes: the same code that generates, over tensors that have no bytes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from fw.checkpointing.elsewhere import allocate, announce, chosen_elsewhere
from fw.checkpointing.streaming import stream
from fw.config import InferenceSection, format_size, parse_size
from fw.errors import UserError
from fw.inference.collective import Collective, Group
from fw.inference.divided import Ranks, Several
from fw.inference.prepare import OverCache, Prepared, device_of, prepare
from fw.inference.ranks import OPTION, of_others
from fw.inference.steady import sizes_on_gpu
from fw.inference.warm_up import record, warm_up
from fw.kernels import elementwise, meeting
from fw.kernels.calls import Kernel
from fw.kernels.linear import PackedLinear
from fw.kernels.meeting import Meeting
from fw.kernels.room import Room
from fw.kinds.attention import AttentionPlugin
from fw.kinds.model import CausalLM
from fw.kinds.offload import OffloadPolicy
from fw.kinds.quantization import QuantizationPlugin
from fw.meter.account import Block, Recorder
from fw.meter.devices import Device, of_product, on_device
from fw.meter.document import Generation, MemoryDocument, PhaseMemory, RankMemory
from fw.meter.memory import held_bytes, host_memory
from fw.meter.step_memory import BUFFERS, COMPONENT_OF, KV, OTHER, RULES, WEIGHTS
from fw.planned import is_gpu, planning_for
from fw.planning.around_steps import filling, highest, read_bytes
from fw.planning.caching_allocator import LARGE_SEGMENT
from fw.planning.ledger import Ledger
from fw.planning.on_gpu import allocator_peaks, with_allocator
from fw.planning.plan import CPU
from fw.planning.worst_step import WorstStep, longest
from fw.pretrained.division import Division
from fw.pretrained.load import structure
from fw.recipe.inference import InferenceRecipe

_CPU = torch.device(CPU)
_MARGINS = (0, LARGE_SEGMENT, 2 * LARGE_SEGMENT, 4 * LARGE_SEGMENT)
"""Left when a budget is divided again: where caches are smaller, a GPU's allocator may keep as many segments for them."""


def plan_generation(
    path: str | Path, recipe: InferenceRecipe, adapter: str | Path | None = None, gpu: Device | None = None
) -> MemoryDocument:
    """Predict what a model takes that generates: weights as they are kept, a step, on a GPU all that it records, and keys and values of
    ``inference.max_sequences`` sequences of ``inference.max_context`` tokens, or as many as ``inference.kv_budget`` holds, or as
    ``inference.budget`` leaves room for; on a GPU without either, as much as is taken there at once.

    Args:
        path: as for :class:`fw.LLM`; of a directory, its config.json is enough where no weights are to stay in files.
        gpu: that it generates on; None for the CPU.

    Raises:
        UserError: as generating would.
    """
    if gpu is None:
        if device_of(recipe.inference.device).type != CPU:
            raise UserError(f"inference.device: {recipe.inference.device} is not what the plan is for; set it to cpu")
        return _divided(path, recipe, adapter, gpu)
    with planning_for(on_device(gpu)):
        return _divided(path, recipe, adapter, gpu)


def gpu_here(recipe: InferenceRecipe) -> Device | None:
    """The GPU of this machine that generates; None for the CPU.

    Raises:
        UserError: there is none, or one that is not known.
    """
    device = device_of(recipe.inference.device)
    if device.type == CPU:
        return None
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"inference.device: {device}: what generating takes is planned for the CPU and for GPUs that are there")
    product = torch.cuda.get_device_name(device)
    known = of_product(product)
    if known is None:
        raise UserError(
            f"inference.device: {device}: nothing is known of {product} to plan with; give inference.kv_budget instead of inference.budget,"
            " and with offload.params=auto also offload.max_memory='{device: …}', or fw plan a YAML file as --device that describes it"
        )
    return replace(known, memory_bytes=torch.cuda.get_device_properties(device).total_memory)


def _divided(path: str | Path, recipe: InferenceRecipe, adapter: str | Path | None, gpu: Device | None) -> MemoryDocument:
    found = _planned(path, recipe, adapter, gpu)
    for margin in _MARGINS:
        generation = found.generation
        assert generation is not None
        room = generation.kv_budget - margin
        least = generation.token_bytes * recipe.kv_cache.kept_tokens(2, recipe.inference.sequence_share)
        taken_at_once = gpu is not None and not recipe.inference.budget  # whether that fits or not
        if found.fits or taken_at_once or recipe.inference.kv_budget or not generation.largest_context or room < least:
            break
        found = _planned(path, _with_room(recipe, room), adapter, gpu)
    return found


def within_budget(path: str | Path, recipe: InferenceRecipe, adapter: str | Path | None = None) -> InferenceRecipe:
    """The recipe whose ``inference.kv_budget`` is what ``inference.budget`` leaves, where there is one.

    Raises:
        UserError: it leaves nothing, or as :func:`plan_generation`.
    """
    options = recipe.inference
    if not options.budget:
        return recipe
    found = plan_generation(path, recipe, adapter, gpu := gpu_here(recipe))
    generation, parts = found.generation, found.largest.at_peak
    assert generation is not None
    if not found.fits:
        besides = format_size(found.largest.taken - parts.get("kv", 0))
        kept = (
            f"of inference.kv_budget, {options.kv_budget}" if options.kv_budget else f"{generation.token_bytes:,.0f} bytes for each token"
        )
        bits, elsewhere = ("inference.weights, quantization", "in their files") if gpu is None else ("quantization", "on the host")
        fewer = f"keep weights in fewer bits ({bits}), or leave some {elsewhere} (offload.params=auto)"
        raise UserError(
            f"inference.budget: {options.budget} is too small: weights and a step take {besides}, and keys and values come besides,"
            f" {kept}; raise it, {fewer}"
        )
    return _with_room(recipe, parts.get("kv", 0))


def _with_room(recipe: InferenceRecipe, kv_bytes: int) -> InferenceRecipe:
    return replace(recipe, inference=replace(recipe.inference, kv_budget=f"{kv_bytes}B"))


def _planned(path: str | Path, recipe: InferenceRecipe, adapter: str | Path | None, gpu: Device | None) -> MemoryDocument:
    """Of all ranks, of which those between the first, that gathers, and the last, that may have less, are alike."""
    ranks = recipe.inference.tensor
    agreed: list[int] = []
    found = {rank: _of_rank(path, recipe, adapter, rank, gpu, agreed) for rank in sorted({0, min(1, ranks - 1), ranks - 1})}
    of_each = [found[rank if rank in found else 1].largest for rank in range(ranks)]
    return replace(found[0], world_size=ranks, per_rank=[replace(of, rank=rank) for rank, of in enumerate(of_each)])


def _of_rank(
    path: str | Path, recipe: InferenceRecipe, adapter: str | Path | None, number: int, gpu: Device | None, agreed: list[int]
) -> MemoryDocument:
    """Of one.

    Args:
        agreed: what the first rank has said, which is planned before the others.
    """
    imported = held_bytes(_CPU) or 0
    options = recipe.inference
    with _without_kernels(), Ledger(gpu) as ledger:
        with ledger.recording(_CPU, RULES) as loading:
            reader = _Reader(ledger, loading)
            ranks = _ranks(number, options.tensor, gpu is not None, agreed)
            of_rank = of_others(recipe) if number else recipe
            prepared = prepare(path, of_rank, adapter, lambda told: None, reader.read, lambda device: _free(ledger, gpu, options), ranks)
            for each in _models(prepared):
                loading.name(WEIGHTS, _weights(each.model))
                loading.name(BUFFERS, each.model.buffers())
            loading.name_rest(KV)
        steps = []
        kept = ledger.blocks(KV)
        if gpu is not None:
            with _step_of(prepared, ledger, kept) as found:
                *others, largest = sizes_on_gpu(options.max_sequences)
                for each in _models(prepared):
                    warm_up(each.runner, each.cache, each.context, [largest])
                    record(each.runner, each.cache, others)
            steps.append(found.history)
        with _step_of(prepared, ledger, kept) as found:
            worst = WorstStep(prepared, recipe)
            found.name_rest(KV)  # a cache that takes memory for each sequence
            worst.run(first=not number)
            del worst
        steps.append(found.history)
        account = max((history.account(COMPONENT_OF) for history in steps), key=lambda account: account.peak_bytes)
        host_bytes = 0 if ledger.gpu is None else ledger.gpu.host_peak_bytes
    load = PhaseMemory(highest(loading.history), 0, reader.read_bytes)
    step = PhaseMemory(account.at_peak)
    peak = account.peak_bytes
    host = imported + (max(peak, load.allocated_peak) if gpu is None else host_bytes)
    rank = RankMemory(number, peak, peak, peak, 0, host, "generate", account.at_peak, account.most, {"load": load, "generate": step})
    most = host_memory() // options.tensor if gpu is None else gpu.memory_bytes
    budget = parse_size(options.budget) if options.budget else most
    budget = budget if gpu is None else min(budget, most)
    if gpu is not None:
        groups = {tuple(range(options.tensor))} if options.tensor > 1 else set()
        rank = with_allocator(rank, allocator_peaks(steps, loading.history), gpu, groups)
    generation = _generation(prepared, recipe, rank.taken - account.at_peak.get("kv", 0), budget)
    if gpu is not None:
        generation = _with_brought(generation, prepared.own.model, gpu)
    return MemoryDocument(str(path), "cpu" if gpu is None else gpu.name, 1, budget, [rank], None, generation)


def _free(ledger: Ledger, gpu: Device | None, options: InferenceSection) -> float:
    """What a model that is read leaves of a GPU, where nothing else bounds keys and values: there they are taken at once."""
    if gpu is None or options.budget:
        return math.inf
    left = gpu.memory_bytes - gpu.context_bytes - ledger.live_bytes
    return left if left > 0 else math.inf  # it is said what is missing


@contextmanager
def _step_of(prepared: Prepared, ledger: Ledger, kept: Collection[Block]) -> Iterator[Recorder]:
    """Records, and knows what was there before.

    Args:
        kept: for keys and values.
    """
    with ledger.recording(_CPU, RULES) as found:
        for each in _models(prepared):
            found.known(WEIGHTS, _weights(each.model))
            found.known(BUFFERS, each.model.buffers())
        for block in kept:
            block.category = KV
        found.known_rest(OTHER)
        yield found


def _ranks(number: int, ranks: int, on_gpus: bool, agreed: list[int]) -> Ranks:
    """One of them, that meets nobody."""
    if ranks == 1:
        return Ranks()
    kernels = not on_gpus and meeting.available()
    return _Alone(number, ranks, _Unmet(number, ranks) if kernels else _UnmetGroup(number, ranks, on_gpus), agreed)


class _Alone(Several):
    def __init__(self, rank: int, ranks: int, collective: Collective, agreed: list[int]) -> None:
        super().__init__(rank, ranks, OPTION, collective)
        self._agreed = agreed

    def agreed(self, value: int) -> int:
        """The first one's, that has been planned."""
        if not self.rank:
            self._agreed[:] = [value]
        return self._agreed[0]


class _Unmet(Meeting):
    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self._meeting = rank, ranks, 0


class _UnmetGroup(Group):
    def __init__(self, rank: int, ranks: int, on_gpus: bool) -> None:
        self._rank, self._ranks, self._on_gpus = rank, ranks, on_gpus

    def _sum(self, x: Tensor) -> None:
        pass

    def _of_all(self, x: Tensor) -> list[Tensor]:
        return [torch.empty_like(x) for _ in range(self._ranks)]


def _weights(model: CausalLM) -> list[Tensor]:
    """Parameters, and what they have become."""
    packed = [buffer for module in model.modules() if isinstance(module, PackedLinear) for buffer in module.buffers()]
    return [*model.parameters(), *packed]


def _models(prepared: Prepared) -> Iterator[OverCache]:
    yield prepared.own
    if prepared.draft is not None:
        yield prepared.draft


def _generation(prepared: Prepared, recipe: InferenceRecipe, besides: int, budget: int) -> Generation:
    """What fits beside weights and a step."""
    options, plugin = recipe.inference, recipe.kv_cache
    token_bytes = sum(each.token_bytes for each in _models(prepared))
    sequences, context = options.max_sequences, options.max_context or prepared.own.model.context
    room = max(0, budget - besides)
    kept = plugin.kept_tokens(context, options.sequence_share)
    return Generation(
        token_bytes,
        sequences,
        context,
        room,
        longest(plugin, context, options.sequence_share, room / token_bytes / sequences),
        int(room / token_bytes // kept),
    )


def _with_brought(generation: Generation, model: CausalLM, gpu: Device) -> Generation:
    """And what comes from elsewhere in every step."""
    brought = sum(tensor.numel() * tensor.element_size() for tensor in model.elsewhere.values())
    seconds = None if model.in_files or not brought else brought / gpu.host_bandwidth
    return replace(generation, brought_bytes=brought, brought_seconds=seconds)


class _Reader:
    """Gives models as :func:`fw.pretrained.load_model` does, with nothing in them."""

    def __init__(self, ledger: Ledger, found: Recorder) -> None:
        self._ledger, self._found = ledger, found
        self.read_bytes = 0

    def read(
        self,
        path: str | Path,
        dtype: torch.dtype,
        device: torch.device,
        attention: AttentionPlugin,
        adapter: str | Path | None = None,
        quantization: QuantizationPlugin | None = None,
        offload: OffloadPolicy | None = None,
        division: Division | None = None,
    ) -> CausalLM:
        """With weights that stay in files, where some are to."""
        with _disable_current_modes():  # on the meta device nothing is to be faked
            model, weights, _ = structure(path, dtype, attention, adapter=adapter, quantization=quantization)
            away = chosen_elsewhere(model, weights, is_gpu(device), offload)
            if division is not None:
                division.cut(model)
        in_files = {name: self._ledger.in_a_file(tensor) for name, tensor in away.in_files.items()}
        announce(model, replace(away, in_files=in_files), is_gpu(device))
        allocate(model)
        model.materialise(device)
        filling(model, weights, self._ledger, initial=False)({n: t for n, t in model.stored().items() if n not in model.in_files})
        stream(model, device)
        self._found.name(WEIGHTS, model.parameters())
        self.read_bytes += read_bytes(model, weights)
        return model.eval()


@contextmanager
def _without_kernels() -> Iterator[None]:
    """Kernels compute nothing, of tensors that have no address; whoever calls them makes what they would fill."""
    call, room, plain = Kernel.__call__, Room.empty, elementwise._PLAIN

    def empty(self: Room, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    fake: Any = FakeTensor
    Kernel.__call__ = lambda self, *given: None  # type: ignore[method-assign]
    Room.empty, elementwise._PLAIN = empty, (*plain, FakeTensor)  # type: ignore[method-assign,assignment]
    fake.data_ptr, fake.numpy = lambda x: x.untyped_storage()._cdata, lambda x: np.zeros(x.shape, str(x.dtype).removeprefix("torch."))
    try:
        yield
    finally:
        Kernel.__call__, Room.empty, elementwise._PLAIN = call, room, plain  # type: ignore[method-assign]
        del fake.data_ptr, fake.numpy
