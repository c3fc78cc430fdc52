"""From a model directory to an engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fw.checkpointing.pages import trim
from fw.config import InferenceSection, format_size, parse_size
from fw.errors import UserError
from fw.inference.adapters import Adapters
from fw.inference.cached import Runner, ThroughCache
from fw.inference.draft import DraftModel
from fw.inference.engine import Engine, Reads
from fw.inference.options import Sampling
from fw.inference.packing import bring_ahead, pack
from fw.inference.speculation import Guesser, PromptLookup
from fw.kernels.linear import PackedLinear
from fw.kinds.kv_cache import KVCache, KVNeeds
from fw.kinds.model import CausalLM
from fw.kinds.offload import OffloadPolicy
from fw.locate import ADAPTER_CONFIG, CONFIG, find, inside
from fw.meter.memory import available_bytes
from fw.place import place
from fw.pretrained import load_model
from fw.pretrained.directory import read_adapter_config, read_config
from fw.pretrained.low_rank import read_low_rank
from fw.recipe.inference import InferenceRecipe
from fw.tokenizer import Tokenizer, load_tokenizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SHARE = 0.4
"""Of the memory that is free, what keys and values may take unless somebody says so."""
_CHOICE = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Loaded:
    """A model that is ready.

    Attributes:
        defaults: how tokens are chosen where a request does not say; ``generation_config.json``'s, where there is one.
    """

    engine: Engine
    tokenizer: Tokenizer
    model: CausalLM
    defaults: Sampling
    kv_budget_bytes: int
    device: torch.device


def load(path: str | Path, recipe: InferenceRecipe, adapter: str | Path | None = None, say: Callable[[str], None] = print) -> Loaded:
    """Read weights and tokenizer, and make room for keys and values.

    Args:
        path: a model directory, an adapter's, a run of fw's own, or ``org/name`` of the hub.
        say: is told what was changed of what was asked for.

    Raises:
        UserError: there is no such model, or it cannot generate so.
    """
    options = recipe.inference
    device = _device(options.device)
    base = _base(path)
    config = read_config(place(base))
    dtype = _dtype(options.dtype, config)
    model = load_model(
        path, dtype, device, ThroughCache(), adapter=adapter, quantization=recipe.quantization, offload=_offload(recipe, device)
    )
    if model.adapters is not None and getattr(model, "prompt_embeddings", None) is not None:
        raise UserError(f"{adapter or path} is an adapter of virtual tokens (peft=prompt), which generation does not put before prompts")
    context = _context(model, config, options.max_context)
    plugin = recipe.kv_cache
    tokenizer = _tokenizer(path, base)
    draft = _draft(options.draft, dtype, device, tokenizer) if options.draft else None
    token_bytes = plugin.token_bytes(model.kv_shapes, dtype)
    draft_bytes = plugin.token_bytes(draft.kv_shapes, dtype) if draft is not None else 0
    each = (token_bytes + draft_bytes) * plugin.kept_tokens(context, options.prompt_share)
    budget = _budget(options.kv_budget, each * options.max_sequences, device)
    own = int(budget * token_bytes / (token_bytes + draft_bytes))
    cache = plugin.make(KVNeeds(model.kv_shapes, dtype, device, own, context, options.prompt_share))
    if cache.capacity < context:
        say(f"keys and values of {cache.capacity:,} tokens fit {format_size(budget)}, so no sequence may have more, instead of {context:,}")
        context = cache.capacity
    if context < 2:
        raise UserError(f"inference.kv_budget: {format_size(budget)} hold {context} token, and a prompt and its answer are two at least")
    generation = _generation(base)
    all_read = model.active_parameters() == sum(parameter.numel() for parameter in model.parameters())
    own_threads = pack(model, options.weights) > 0
    bring_ahead(model)
    guesser: Guesser | None = PromptLookup() if options.speculate else None
    if draft is not None:
        pack(draft, options.weights)
        needs = KVNeeds(draft.kv_shapes, dtype, device, budget - own, min(context, draft.context), options.prompt_share + options.speculate)
        guesser = _guesser(draft, plugin.make(needs), needs, options, model.vocab_size)
    trim()  # plain weights have been replaced by packed ones
    reads = Reads(_read_by_each_step(model) if all_read else 0, token_bytes)
    adapters = Adapters(model, device, lambda directory: read_low_rank(base, directory, ThroughCache(), dtype))
    engine = Engine(
        Runner(model, cache, device, adapters, options.replay),
        cache,
        options,
        tokenizer,
        context,
        model.vocab_size,
        _ends(config, generation, tokenizer),
        reads,
        adapters,
        guesser,
        own_threads,
    )
    chosen = {name: generation[name] for name in _CHOICE if generation.get(name) is not None} if generation.get("do_sample") else {}
    return Loaded(engine, tokenizer, model, Sampling(**chosen), budget, device)


def _draft(path: str, dtype: torch.dtype, device: torch.device, tokenizer: Tokenizer) -> CausalLM:
    """The model that guesses.

    Raises:
        UserError: there is none, or its tokens are others.
    """
    try:
        own = _tokenizer(path, _base(path))
        model = load_model(path, dtype, device, ThroughCache())
    except UserError as error:
        raise UserError(f"inference.draft: {error}") from None
    if own.vocabulary() != tokenizer.vocabulary():
        raise UserError(
            f"inference.draft: {path} has other tokens than the model, so its guesses mean nothing; give one of the same tokenizer"
        )
    return model


def _guesser(draft: CausalLM, cache: KVCache, needs: KVNeeds, options: InferenceSection, vocab_size: int) -> Guesser:
    runner = Runner(draft, cache, needs.device, Adapters(draft, needs.device, lambda _: {}), options.replay)
    return DraftModel(runner, cache, min(needs.longest, cache.capacity), vocab_size, options.step_tokens, options.prompt_share)


def _read_by_each_step(model: CausalLM) -> int:
    """Bytes of all weights but those that are looked up."""
    looked_up = {id(model.own_embedding.weight)} if model.own_embedding is not None else set()
    packed = sum(module.weight_bytes for module in model.modules() if isinstance(module, PackedLinear))
    return packed + sum(parameter.nbytes for parameter in model.parameters() if id(parameter) not in looked_up)


def _device(wanted: str) -> torch.device:
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise UserError(f"inference.device: '{wanted}' is no device; there are cpu, cuda, cuda:1 and so on") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("inference.device: no GPU is there; use cpu")
    return device


def _base(path: str | Path) -> Path:
    """The directory of the model itself."""
    if inside(Path(path), CONFIG) is None and (adapter := inside(Path(path), ADAPTER_CONFIG)):
        path = read_adapter_config(place(adapter)).get("base_model_name_or_path") or ""
        if not path:
            raise UserError(f"{adapter / ADAPTER_CONFIG} names no base; give the base, and the adapter with it")
    return find(path)


def _offload(recipe: InferenceRecipe, device: torch.device) -> OffloadPolicy:
    policy = recipe.offload
    if policy.params == "cpu" and device.type == "cpu":
        raise UserError("offload.params: cpu is where the model computes; nvme leaves weights in their files")
    if policy.params != "device" and device.type != "cpu":
        raise UserError(
            f"offload.params: {policy.params} is for generating on a CPU so far; set inference.device: cpu, or offload.params: device"
        )
    return policy


def _dtype(wanted: str, config: dict[str, Any]) -> torch.dtype:
    if wanted != "auto":
        return DTYPES[wanted]
    named = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "float32"), None)
    return named if isinstance(named, torch.dtype) and named in DTYPES.values() else torch.float32


def _context(model: CausalLM, config: dict[str, Any], wanted: int | None) -> int:
    longest = model.context
    if wanted is not None and wanted > longest:
        raise UserError(f"inference.max_context: {wanted} is more than the model's own, {longest}")
    return wanted or longest


def _budget(wanted: str, most: float, device: torch.device) -> int:
    if wanted:
        return parse_size(wanted)
    return int(min(most, _SHARE * available_bytes(device)))


def _tokenizer(path: str | Path, base: Path) -> Tokenizer:
    """The adapter's own, where it has one."""
    adapter = inside(Path(path), ADAPTER_CONFIG)
    return load_tokenizer(adapter if adapter is not None and (adapter / "tokenizer.json").is_file() else base)


def _generation(directory: Path) -> dict[str, Any]:
    """``generation_config.json``; empty where there is none."""
    file = directory / "generation_config.json"
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    return found if isinstance(found, dict) else {}


def _ends(config: dict[str, Any], generation: dict[str, Any], tokenizer: Tokenizer) -> frozenset[int]:
    """Whatever anybody says ends a text."""
    said = [config.get("eos_token_id"), generation.get("eos_token_id"), tokenizer.eos_id]
    return frozenset(token for one in said for token in (one if isinstance(one, list) else [one]) if isinstance(token, int))
