"""From a config to what generating text takes: a cache of keys and values, what weights are kept as, and how requests share the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fw.config import PLUGINS, Config, InferenceSection, check_interpolations, fill
from fw.errors import UserError
from fw.kinds import KINDS
from fw.kinds.kv_cache import KVCachePlugin
from fw.kinds.offload import OffloadPolicy
from fw.kinds.quantization import QuantizationPlugin
from fw.planned import planned_gpu
from fw.recipe import rules
from fw.recipe.choosing import check_sections, choose, load_plugins, options_in, with_defaults

INFERENCE = "inference"
OFFLOAD = "offload"
QUANTIZATION = "quantization"
SECTIONS = ("kv_cache", OFFLOAD, QUANTIZATION, INFERENCE, PLUGINS)
"""That mean something while generating."""
_ELSEWHERE = "it is a training run's; give it to fw train"


@dataclass(frozen=True)
class InferenceRecipe:
    """Everything but the model.

    Attributes:
        offload: of the weights.
        quantization: of the weights; None for as the files hold them.
        advice: what to know of the plugins, a sentence each.
    """

    config: Config
    kv_cache: KVCachePlugin
    offload: OffloadPolicy
    quantization: QuantizationPlugin | None
    inference: InferenceSection
    advice: tuple[str, ...] = ()


def resolve_inference(config: Config) -> InferenceRecipe:
    """Turn a config into a recipe.

    Raises:
        UserError: unknown section, plugin or option, or a wrong value.
    """
    kind = KINDS["kv_cache"]
    sections = [*KINDS, "train", "loader", "launch", "memory", "resume"]
    other = {name: _ELSEWHERE for name in sections if name not in SECTIONS}
    other["serve"] = "give it to fw serve"
    check_sections(config, [*SECTIONS], other)
    check_interpolations(config)
    load_plugins(config)
    chosen = {kind.name: choose(kind, config), OFFLOAD: choose(KINDS[OFFLOAD], config)}
    if QUANTIZATION in config.tree:
        chosen[QUANTIZATION] = choose(KINDS[QUANTIZATION], config)
    root = with_defaults(config, chosen, {INFERENCE: InferenceSection})
    made: dict[str, Any] = {}
    for name, (pick,) in chosen.items():
        made[name] = pick.cls(fill(pick.cls.Config, config, pick.path, pick.options, root))
    named = {name: [(pick.name, made[name])] for name, (pick,) in chosen.items()}
    rules.check(named, config)
    options = fill(InferenceSection, config, (INFERENCE,), options_in(config, INFERENCE), root)
    gpu_there = torch.cuda.is_available() or planned_gpu() is not None
    options = options.filled(options.device.startswith("cuda") or (options.device == "auto" and gpu_there))
    offload = made[OFFLOAD].policy()
    _check_offload(config, offload, options)
    return InferenceRecipe(config, made[kind.name], offload, made.get(QUANTIZATION), options, rules.advice(named))


def _check_offload(config: Config, offload: OffloadPolicy, options: InferenceSection) -> None:
    for name, given in (
        ("optimizer", offload.optimizer != "device"),
        ("gradients", offload.gradients != "device"),
        ("activations", offload.activations != "device"),
        ("path", offload.path is not None),
    ):
        if given:
            place = config.origin((OFFLOAD, name))
            why = "weights stay in the files they are in" if name == "path" else "generating has none that are kept"
            raise UserError(f"{place}: offload.{name}: {why}; leave it out")
    if offload.params != "device" and options.weights != "auto":
        place = config.origin((INFERENCE, "weights"))
        raise UserError(f"{place}: inference.weights: {options.weights} makes codes, which are in no file; with offload.params use auto")
