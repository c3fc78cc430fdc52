"""Techniques that trade memory for time, and what of each a config leaves open.

What the user has set stays as it is: only what no file and no override says is searched. Each technique is a list of choices in the order
of the memory they save, as overrides, which is what they would be on the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fw import registry
from fw.checkpointing.quantized_files import weights_of
from fw.config import ASKED_FOR, DEFAULT, Config
from fw.errors import UserError
from fw.kinds.sharding import SHARD
from fw.meter.devices import Device
from fw.recipe import Recipe

MICRO_BATCH, ACTIVATION, LOSS, PRECISION = "micro_batch", "activation", "chunked_loss", "precision"
OPTIMIZER, SHARDING, OFFLOAD, PEFT, QUANTIZATION = "optimizer", "sharding", "offload", "peft", "quantization"

NOTHING = "nothing to choose"

_CHUNK_TOKENS = 1024
_PARTS = (0.25, 0.5, 0.75)
"""Of the blocks that are recomputed."""
_MOST_MICRO_BATCHES = 6
"""Sizes that are tried besides the largest."""


@dataclass(frozen=True)
class Choice:
    """One way to use a technique.

    Attributes:
        overrides: ``key=value``, what it changes.
        memory_part: where between the config as it is (0) and the technique's reference (1) its memory lies; 1 for what is a reference.
        time_part: the same of its time.
        reference: the choice that it lies on the way to; None for what has to be planned by itself.
        resort: what its time does not show, 0 for nothing: how much else is learnt, or that a disk may have to be read. However fast, it
            serves only where nothing that resorts to less fits.
    """

    technique: str
    overrides: tuple[str, ...]
    memory_part: float = 1.0
    time_part: float = 1.0
    reference: Choice | None = None
    resort: int = 0

    @property
    def label(self) -> str:
        """As on the command line."""
        return " ".join(self.overrides)


@dataclass(frozen=True)
class Technique:
    """What may be chosen of it; nothing where ``kept`` says why not."""

    name: str
    choices: Sequence[Choice] = ()
    kept: str = ""


def techniques(recipe: Recipe, gpu: Device | None, *, all_open: bool = False) -> list[Technique]:
    """Those that ``memory.techniques`` names, with the choices that the config leaves open.

    Args:
        gpu: what the run computes on; None for the CPU.
        all_open: all there are, as if nothing were set; adapters only for a model that is there to be changed.
    """
    if all_open:
        names = [name for name in TECHNIQUES if name not in ASKED_FOR or recipe.model.weights is not None]
        recipe = replace(recipe, memory=replace(recipe.memory, techniques=names))
    else:
        names = [name for name in TECHNIQUES if name in recipe.memory.techniques]
    return [_open(name, recipe, gpu, all_open) for name in names]


def _open(name: str, recipe: Recipe, gpu: Device | None, all_open: bool) -> Technique:
    path, choices = TECHNIQUES[name]
    if not all_open and (place := _set_at(recipe.config, path)):
        return Technique(name, kept=f"set at {place}")
    found = choices(recipe, gpu)
    return Technique(name, found, "" if found else NOTHING)


def _set_at(config: Config, path: tuple[str, ...]) -> str:
    """Where the user has set it; empty where not, or to null, which leaves the choice open."""
    section = config.tree.get(path[0])
    if len(path) == 1:  # a plugin: its name
        named = isinstance(section, str) or (isinstance(section, Mapping) and "name" in section)
        origin = config.origin(path if isinstance(section, str) else (*path, "name"))
        return str(origin) if named and origin != DEFAULT else ""
    if path == ("train", "micro_batch_size") and config.was_set("train", "max_tokens_per_batch"):
        path = ("train", "max_tokens_per_batch")
    value = section.get(path[1]) if isinstance(section, Mapping) else None
    return "" if value is None else str(config.origin(path))


def _micro_batches(recipe: Recipe, gpu: Device | None) -> list[Choice]:
    """All that divide a rank's share; accumulation keeps the global batch. Memory is between whole and one, time goes with their number."""
    whole = recipe.micro_batch_size
    sizes = [size for size in range(whole - 1, 0, -1) if whole % size == 0]
    if len(sizes) > _MOST_MICRO_BATCHES:  # largest and smallest, and between them as evenly as they come
        sizes = [sizes[round(place * (len(sizes) - 1) / (_MOST_MICRO_BATCHES - 1))] for place in range(_MOST_MICRO_BATCHES)]
    if not sizes:
        return []
    least = Choice(MICRO_BATCH, ("train.micro_batch_size=1",))
    between = [
        Choice(MICRO_BATCH, (f"train.micro_batch_size={size}",), (whole - size) / (whole - 1), (whole / size - 1) / (whole - 1), least)
        for size in sizes[:-1]
    ]
    return [*between, least]


def _activations(recipe: Recipe, gpu: Device | None) -> list[Choice]:
    """Recompute what is cheap, then more and more blocks, then all."""
    full = Choice(ACTIVATION, ("activation=full",))
    parts = [Choice(ACTIVATION, (f"activation={{name: ratio, ratio: {part}}}",), part, part, full) for part in _PARTS]
    return [Choice(ACTIVATION, ("activation=selective",)), *parts, full]


def _losses(recipe: Recipe, gpu: Device | None) -> list[Choice]:
    if (
        recipe.tree["objective"].get("chunk_tokens", _CHUNK_TOKENS)
        or recipe.micro_batch_size * recipe.train.sequence_length <= _CHUNK_TOKENS
    ):
        return []
    return [Choice(LOSS, (f"objective.chunk_tokens={_CHUNK_TOKENS}",))]


def _precisions(recipe: Recipe, gpu: Device | None) -> list[Choice]:
    """Half the bytes for what is computed; weights and their updates stay in float32."""
    if recipe.precision.policy().compute != torch.float32:
        return []
    has_bf16 = gpu is None or "bfloat16" in gpu.peak_flops
    return [Choice(PRECISION, (f"precision={'bf16' if has_bf16 else 'fp16'}",))]


def _optimizers(recipe: Recipe, gpu: Device | None) -> list[Choice]:
    """The same rule with its state in 8 bits."""
    name = f"{recipe.names['optimizer'][0]}_8bit"
    return [Choice(OPTIMIZER, (f"optimizer.name={name}",))] if name in {entry.name for entry in registry.entries("optimizer")} else []


def _shardings(recipe: Recipe, gpu: Device | None) -> list[Choice]:
    """Of one host's ranks, then of all."""
    if recipe.world_size == 1 or SHARD in recipe.mesh_shape:
        return []
    host, hosts = recipe.ranks_per_host, recipe.world_size // recipe.ranks_per_host
    by_host = [Choice(SHARDING, (f"sharding={{name: fsdp, replicate: {hosts}}}",))] if hosts > 1 and host > 1 else []
    return [*by_host, Choice(SHARDING, ("sharding=fsdp",))]


def _offloads(recipe: Recipe, gpu: Device | None) -> list[Choice]:
    """To the host's memory, where that is another than the device's; where it is not, what is frozen stays in its files."""
    if gpu is None:
        return _frozen(recipe)
    if recipe.names[PEFT] != ("none",) and not recipe.sharding.moves_parameters:  # what trains is small beside what does not
        return [Choice(OFFLOAD, ("offload.params=cpu",)), Choice(OFFLOAD, ("offload.params=cpu", "offload.activations=cpu"))]
    return [Choice(OFFLOAD, ("offload.optimizer=cpu",)), Choice(OFFLOAD, ("offload.optimizer=cpu", "offload.activations=cpu"))]


def _frozen(recipe: Recipe) -> list[Choice]:
    """What is read where it lies is in the dtype of compute."""
    directory = recipe.model.weights
    if recipe.names[PEFT] == ("none",) or directory is None or SHARD in recipe.mesh_shape:
        return []
    try:
        files = weights_of(directory)
    except UserError:  # a plan needs none
        return []
    dtypes = {files.dtype(name) for name in files.where if len(files.shape(name)) > 1}
    if recipe.precision.policy().compute in dtypes:
        return [Choice(OFFLOAD, ("offload.params=nvme",), resort=1)]
    if torch.bfloat16 not in dtypes or _set_at(recipe.config, (PRECISION,)) or PRECISION not in recipe.memory.techniques:
        return []
    return [Choice(OFFLOAD, ("offload.params=nvme", "precision=bf16"), resort=1)]


def _adapters(recipe: Recipe, gpu: Device | None) -> list[Choice]:
    """Adapters instead of all weights; on a base of 4 bits where that may be, too."""
    lora = [Choice(PEFT, ("peft=lora",), resort=1)]
    if QUANTIZATION not in recipe.memory.techniques or _set_at(recipe.config, (QUANTIZATION,)):
        return lora
    return [*lora, Choice(PEFT, ("peft=lora", "quantization=nf4"), resort=2)]


def _quantizations(recipe: Recipe, gpu: Device | None) -> list[Choice]:
    """Of the base of adapters that the config has; else :func:`_adapters` does."""
    if recipe.names[PEFT] == ("none",) or recipe.names[QUANTIZATION] != ("none",):
        return []
    return [Choice(QUANTIZATION, ("quantization=nf4",), resort=1)]


TECHNIQUES: dict[str, tuple[tuple[str, ...], Callable[[Recipe, Device | None], list[Choice]]]] = {
    MICRO_BATCH: (("train", "micro_batch_size"), _micro_batches),
    LOSS: (("objective", "chunk_tokens"), _losses),
    ACTIVATION: (("activation",), _activations),
    PRECISION: (("precision",), _precisions),
    OPTIMIZER: (("optimizer",), _optimizers),
    SHARDING: (("sharding",), _shardings),
    OFFLOAD: (("offload",), _offloads),
    PEFT: (("peft",), _adapters),
    QUANTIZATION: (("quantization",), _quantizations),
}
"""By name: what of a config sets it, and what there is to choose."""
