"""From a model directory to a model that runs over a cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fw.config import format_size, parse_size
from fw.errors import UserError
from fw.inference.adapters import Adapters
from fw.inference.cached import Runner, ThroughCache
from fw.inference.divided import Ranks
from fw.inference.invariant import InTiles, refuse
from fw.inference.packing import codes_of, join, pack, products_of_torch
from fw.kernels.linear import available
from fw.kinds.kv_cache import KVCache, KVNeeds
from fw.kinds.model import CausalLM
from fw.kinds.offload import OffloadPolicy
from fw.kinds.peft import LowRankChange
from fw.locate import ADAPTER_CONFIG, CONFIG, find, inside
from fw.meter.memory import available_bytes
from fw.place import place
from fw.planned import is_gpu, planned_gpu
from fw.pretrained import load_model
from fw.pretrained.directory import named_base, read_config
from fw.pretrained.low_rank import read_low_rank, refuse_virtual_tokens
from fw.recipe.inference import InferenceRecipe

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHARE = 0.4
"""Of the memory that is free, what keys and values may take unless somebody says so."""


@dataclass(frozen=True)
class OverCache:
    """A model with its cache.

    Attributes:
        kv_bytes: that keys and values may take.
        token_bytes: that those of a token take.
        context: tokens of the longest sequence that it can have.
    """

    model: CausalLM
    runner: Runner
    cache: KVCache
    adapters: Adapters
    kv_bytes: int
    token_bytes: float
    context: int


@dataclass(frozen=True)
class Prepared:
    """What generates.

    Attributes:
        base: the model's directory; ``config``, what its config.json says.
        draft: a smaller model that guesses; None where nobody asked for one.
        kv_budget: bytes for keys and values, the draft's included.
        own_threads: all linear layers are computed by kernels of fw's own.
    """

    base: Path
    config: dict[str, Any]
    device: torch.device
    own: OverCache
    draft: OverCache | None
    kv_budget: int
    own_threads: bool


def prepare(
    path: str | Path,
    recipe: InferenceRecipe,
    adapter: str | Path | None,
    say: Callable[[str], None],
    read: Callable[..., CausalLM] = load_model,
    free: Callable[[torch.device], float] = available_bytes,
    ranks: Ranks | None = None,
) -> Prepared:
    """Read weights, and make room for keys and values.

    Args:
        path: a model directory, an adapter's, a run of fw's own, or ``org/name`` of the hub.
        say: is told what was changed of what was asked for.
        read: gives the model of a directory, as :func:`fw.pretrained.load_model` does.
        free: bytes of a device that can be had.
        ranks: that divide the model's layers; None where this process has all of them.

    Raises:
        UserError: there is no such model, or it cannot generate so.
    """
    options = recipe.inference
    ranks = ranks or Ranks()
    device = device_of(options.device, ranks.rank)
    base = base_of(path)
    config = read_config(place(base))
    dtype = _dtype(options.dtype, config)
    said = {"adapter": adapter, "quantization": recipe.quantization, "offload": _offload(recipe, device, ranks)}
    model = read(path, dtype, device, ThroughCache(), **said, division=ranks.division)
    refuse_virtual_tokens(model, adapter or path)
    models = [model, *([_draft(options.draft, dtype, device, read)] if options.draft else [])]
    context = _context(model, options.max_context)
    plugin = recipe.kv_cache
    if options.batch_invariant:
        refuse(model, plugin)
    divided = [ranks, *(Ranks() for _ in models[1:])]  # a draft is the first one's
    shapes = [between.kv_shapes(each) for each, between in zip(models, divided, strict=True)]
    token_bytes = [plugin.token_bytes(these, dtype) for these in shapes]
    kept = plugin.kept_tokens(context, options.sequence_share)
    sharing = 1 if is_gpu(device) else ranks.ranks
    budget = _budget(options.kv_budget, sum(token_bytes) * kept * options.max_sequences, device, lambda of: free(of) / sharing)
    replaced = [
        pack(each, options.weights, dtype, each is not model) for each in models
    ]  # before there are caches: meanwhile a weight is there twice
    if is_gpu(device):
        for each in models:
            join(each)
    ranks.join(model)
    made: list[OverCache] = []
    there = base.absolute()  # what it is now: adapters come later

    def changes(directory: str) -> Mapping[str, LowRankChange]:
        return ranks.low_rank(read_low_rank(there, directory, ThroughCache(), dtype))

    for each, between, these, bytes_of in zip(models, divided, shapes, token_bytes, strict=True):
        longest = min(context, each.context)
        step_tokens = options.sequence_share if made else options.prompt_share
        share = between.agreed(int(budget * bytes_of / sum(token_bytes)))
        tiled = options.batch_invariant and not made  # what a draft guesses changes no answer
        cache = plugin.make(KVNeeds(these, dtype, device, share, longest, step_tokens, batch_invariant=tiled))
        adapters = Adapters(each, device, changes, ranks.loaded)
        replay = options.replay and not tiled
        runner = (InTiles if tiled else Runner)(each, cache, device, adapters, replay, between)
        made.append(OverCache(each, runner, cache, adapters, share, bytes_of, min(longest, cache.capacity)))
    own = made[0]
    for advice in recipe.advice:
        say(f"warning: {advice}")
    if own.context < context:
        say(f"keys and values of {own.context:,} tokens fit {format_size(budget)}, so no sequence may have more, instead of {context:,}")
    if own.context < 2:
        raise UserError(
            f"inference.kv_budget: {format_size(budget)} hold {own.context} token, and a prompt and its answer are two at least"
        )
    if options.dtype == "auto" and (slow := _weights_of_codes(model, dtype, device)):
        name = str(dtype).removeprefix("torch.")
        say(
            f"warning: in {name} (inference.dtype: auto) weights are made of the codes of {slow} layers in every step; products with the"
            " codes themselves are in bfloat16: inference.dtype=bf16"
        )
    own_threads = replaced[0] > 0 and not products_of_torch(model)
    return Prepared(base, config, device, own, made[1] if options.draft else None, budget, own_threads)


def base_of(path: str | Path) -> Path:
    """The directory of the model itself.

    Raises:
        UserError: there is none.
    """
    if inside(Path(path), CONFIG) is None and (adapter := inside(Path(path), ADAPTER_CONFIG)):
        path = named_base(adapter)
    return find(path)


def _weights_of_codes(model: CausalLM, dtype: torch.dtype, device: torch.device) -> int:
    """Layers that a kernel of the CPU would compute with in another dtype."""
    if device.type != "cpu" or is_gpu(device) or dtype == torch.bfloat16 or not available():
        return 0
    return sum(codes_of(module) is not None for module in model.modules())


def _draft(path: str, dtype: torch.dtype, device: torch.device, read: Callable[..., CausalLM]) -> CausalLM:
    try:
        return read(path, dtype, device, ThroughCache())
    except UserError as error:
        raise UserError(f"inference.draft: {error}") from None


def device_of(wanted: str, rank: int = 0) -> torch.device:
    """Of a rank, of what ``inference.device`` says.

    Raises:
        UserError: there is none.
    """
    if planned_gpu() is not None:
        return torch.device("cpu")  # which stands for it
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise UserError(f"inference.device: '{wanted}' is no device; there are cpu, cuda, cuda:1 and so on") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("inference.device: no GPU is there; use cpu")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise UserError(f"inference.device: '{wanted}' is not there; this machine has {_gpus(count)}")
    return torch.device("cuda", (device.index or 0) + rank) if device.type == "cuda" and rank else device


def _gpus(count: int) -> str:
    return "cuda:0 alone" if count == 1 else f"cuda:0 to cuda:{count - 1}"


def _offload(recipe: InferenceRecipe, device: torch.device, ranks: Ranks) -> OffloadPolicy:
    policy = recipe.offload
    assert not policy.automatic, "fw.planning.placing says where"
    if policy.params != "device" and ranks.ranks > 1:
        raise UserError(
            f"offload.params: {policy.params} leaves whole weights in files, and ranks have parts of them; set inference.tensor: 1"
        )
    if policy.params == "cpu" and not is_gpu(device):
        raise UserError("offload.params: cpu is where the model computes; nvme leaves weights in their files")
    if policy.params != "device" and not is_gpu(device) and device.type != "cpu":
        raise UserError(f"offload.params: {policy.params} is for CPUs and GPUs, and not for {device.type}; set offload.params: device")
    return policy


def _dtype(wanted: str, config: dict[str, Any]) -> torch.dtype:
    if wanted != "auto":
        return DTYPES[wanted]
    named = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "float32"), None)
    return named if isinstance(named, torch.dtype) and named in DTYPES.values() else torch.float32


def _context(model: CausalLM, wanted: int | None) -> int:
    longest = model.context
    if wanted is not None and wanted > longest:
        raise UserError(f"inference.max_context: {wanted} is more than the model's own, {longest}")
    return wanted or longest


def _budget(wanted: str, most: float, device: torch.device, free: Callable[[torch.device], float]) -> int:
    if wanted:
        return parse_size(wanted)
    return int(min(most, SHARE * free(device)))
