"""From a model directory to an engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fw.checkpointing.in_files import bring_ahead
from fw.checkpointing.pages import trim
from fw.errors import UserError
from fw.inference.draft import DraftModel
from fw.inference.engine import Engine, Reads
from fw.inference.invariant import InTiles, try_out
from fw.inference.options import Sampling
from fw.inference.prepare import OverCache, Prepared, base_of, device_of, prepare
from fw.inference.ranks import First
from fw.inference.speculation import Guesser, PromptLookup
from fw.kernels.build import with_threads
from fw.kernels.linear import PackedLinear
from fw.kernels.threads import alone
from fw.kinds.model import CausalLM
from fw.locate import ADAPTER_CONFIG, CONFIG, inside, settled
from fw.planned import made_current
from fw.recipe.inference import InferenceRecipe
from fw.tokenizer import TextStream, Tokenizer, load_tokenizer

_GENERATION = "generation_config.json"
_CHOICE = ("temperature", "top_k", "top_p", "min_p")
_PENALTY = ("repetition_penalty",)


@dataclass(frozen=True)
class Loaded:
    """A model that is ready.

    Attributes:
        ranks: that have parts of it, to be closed; None where nobody else has.
        architecture: as config.json names it; empty where it does not.
        defaults: how tokens are chosen where a request does not say; ``generation_config.json``'s, where there is one.
    """

    engine: Engine
    tokenizer: Tokenizer
    model: CausalLM
    defaults: Sampling
    kv_budget_bytes: int
    device: torch.device
    architecture: str = ""
    ranks: First | None = None


def load(path: str | Path, recipe: InferenceRecipe, adapter: str | Path | None = None, say: Callable[[str], None] = print) -> Loaded:
    """Read weights and tokenizer, and make room for keys and values.

    Args:
        path: a model directory, an adapter's, a run of fw's own, or ``org/name`` of the hub.
        say: is told what was changed of what was asked for.

    Raises:
        UserError: there is no such model, or it cannot generate so.
    """
    options = recipe.inference
    path, adapter = settled(path, CONFIG, ADAPTER_CONFIG), None if adapter is None else settled(adapter, ADAPTER_CONFIG)
    tokenizer = _tokenizer(path, base_of(path))
    _check_decoder(tokenizer)
    if options.draft:
        _check_tokens(options.draft, tokenizer)
    device = device_of(options.device)
    if device.type == "cuda" and device.index is None:  # the one that is current now; other threads have another
        device = torch.device("cuda", torch.cuda.current_device())
        recipe = replace(recipe, inference=replace(options, device=str(device)))
    with made_current(device):
        if options.tensor == 1:
            return _loaded(prepare(path, recipe, adapter, say), recipe, tokenizer)
        ranks = First(path, recipe, adapter, device)
        try:
            return _loaded(prepare(path, recipe, adapter, say, ranks=ranks), recipe, tokenizer, ranks)
        except BaseException:
            ranks.close()
            raise


def _loaded(prepared: Prepared, recipe: InferenceRecipe, tokenizer: Tokenizer, ranks: First | None = None) -> Loaded:
    own = prepared.own
    generation = _generation(prepared.base)
    defaults = _defaults(generation, prepared.base / _GENERATION)
    bring_ahead(own.model)
    trim()  # plain weights have been replaced by packed ones
    cache = own.cache if ranks is None else ranks.mirrored(own.cache)
    threads = partial(_in_step, prepared.own_threads, None if ranks is None else ranks.threads, prepared.device)
    if isinstance(own.runner, InTiles):
        with threads():
            try_out(own.runner, cache, own.context, own.model.vocab_size)
    engine = Engine(
        own.runner,
        cache,
        recipe.inference,
        tokenizer,
        own.context,
        own.model.vocab_size,
        _ends(prepared.config, generation, tokenizer, own.model.vocab_size),
        _reads(own, 1 if ranks is None else ranks.ranks),
        own.adapters,
        _guesser(prepared, recipe),
        threads,
        own.model.shows_hidden_states,
        overlap=recipe.inference.overlap and prepared.device.type == "cuda" and ranks is None,
    )
    architecture = next(iter(prepared.config.get("architectures") or ()), "")
    return Loaded(engine, tokenizer, own.model, defaults, prepared.kv_budget, prepared.device, architecture, ranks)


@contextmanager
def _in_step(own: bool, several: int | None, device: torch.device) -> Iterator[None]:
    """Torch's threads rest where kernels of fw's own do the work; of several ranks each has so many. A GPU is the current one."""
    with ExitStack() as stack:
        stack.enter_context(made_current(device))
        if several is not None:
            stack.enter_context(with_threads(several))
        if own or several is not None:
            stack.enter_context(alone(1 if own else several or 1))
        yield


def _guesser(prepared: Prepared, recipe: InferenceRecipe) -> Guesser | None:
    options, draft = recipe.inference, prepared.draft
    if draft is not None:
        sizes = prepared.own.model.vocab_size, draft.model.vocab_size
        return DraftModel(draft.runner, draft.cache, draft.context, *sizes, options.step_tokens, options.prompt_share)
    return PromptLookup() if options.speculate else None


def _check_decoder(tokenizer: Tokenizer) -> None:
    """Now, and not when the first request has begun."""
    try:
        TextStream(tokenizer)
    except UserError as error:
        raise UserError(f"{tokenizer.place}: answers are given as they come, and {error}") from None


def _check_tokens(draft: str, tokenizer: Tokenizer) -> None:
    try:
        own = _tokenizer(draft, base_of(draft))
    except UserError as error:
        raise UserError(f"inference.draft: {error}") from None
    if own.vocabulary() != tokenizer.vocabulary():
        raise UserError(
            f"inference.draft: {draft} has other tokens than the model, so its guesses mean nothing; give one of the same tokenizer"
        )


def _reads(own: OverCache, ranks: int) -> Reads:
    """Of all ranks, which are as large."""
    return Reads(ranks * _read_by_each_step(own.model), ranks * own.token_bytes)


def _read_by_each_step(model: CausalLM) -> int:
    """Bytes of all weights but those that are looked up; 0 where tokens take different ones."""
    if model.active_parameters() != sum(parameter.numel() for parameter in model.parameters()):
        return 0
    looked_up = {id(model.own_embedding.weight)} if model.own_embedding is not None else set()
    packed = sum(module.weight_bytes for module in model.modules() if isinstance(module, PackedLinear))
    return packed + sum(parameter.nbytes for parameter in model.parameters() if id(parameter) not in looked_up)


def weight_bytes(model: CausalLM) -> int:
    """Of all weights in memory, packed or not; of those that come from elsewhere, what they take where they are brought to. Those that a
    processor reads where they lie in files take none."""
    mapped = {tensor.data_ptr() for tensor in model.in_files.values()}
    packed = sum(m.weight_bytes for m in model.modules() if isinstance(m, PackedLinear) and m.packed.data_ptr() not in mapped)
    own = sum(p.nbytes for name, p in model.named_parameters() if name not in model.elsewhere and p.data_ptr() not in mapped)
    places = {(storage := model.get_parameter(name).untyped_storage()).data_ptr(): storage.nbytes() for name in model.elsewhere}
    return packed + own + sum(places.values())


def _tokenizer(path: str | Path, base: Path) -> Tokenizer:
    """The adapter's own, where it has one."""
    adapter = inside(Path(path), ADAPTER_CONFIG)
    return load_tokenizer(adapter if adapter is not None and (adapter / "tokenizer.json").is_file() else base)


def _generation(directory: Path) -> dict[str, Any]:
    """``generation_config.json``; empty where there is none."""
    file = directory / _GENERATION
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    return found if isinstance(found, dict) else {}


def _defaults(generation: dict[str, Any], file: Path) -> Sampling:
    """How tokens are chosen: drawn where the file says so, or says nothing; the likeliest where it says ``do_sample: false``, which leaves
    aside what is said of drawing."""
    draws = generation.get("do_sample")
    said = _said(generation, (*_PENALTY, *(_CHOICE if draws else ())))
    try:
        return Sampling(**said) if draws is not False else Sampling(temperature=0, **said)
    except UserError as error:
        raise UserError(f"{file}: {error}; correct it there") from None


def _said(generation: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: generation[name] for name in names if generation.get(name) is not None}


def _ends(config: dict[str, Any], generation: dict[str, Any], tokenizer: Tokenizer, vocab_size: int) -> frozenset[int]:
    """Whatever anybody says ends a text, if the model has it."""
    said = [config.get("eos_token_id"), generation.get("eos_token_id"), tokenizer.eos_id]
    ends = (token for one in said for token in (one if isinstance(one, list) else [one]))
    return frozenset(token for token in ends if isinstance(token, int) and 0 <= token < vocab_size)
