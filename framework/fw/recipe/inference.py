"""From a config to what generating text takes: a cache of keys and values, what weights are kept as, and how requests share the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fw.config import Config, InferenceSection, check_interpolations, fill
from fw.kinds import KINDS
from fw.kinds.kv_cache import KVCachePlugin
from fw.kinds.quantization import QuantizationPlugin
from fw.recipe.choosing import check_sections, choose, options_in, with_defaults

INFERENCE = "inference"
QUANTIZATION = "quantization"
_ELSEWHERE = "it is a training run's; give it to fw train"


@dataclass(frozen=True)
class InferenceRecipe:
    """Everything but the model.

    Attributes:
        quantization: of the weights; None for as the files hold them.
    """

    config: Config
    kv_cache: KVCachePlugin
    quantization: QuantizationPlugin | None
    inference: InferenceSection


def resolve_inference(config: Config) -> InferenceRecipe:
    """Turn a config into a recipe.

    Raises:
        UserError: unknown section, plugin or option, or a wrong value.
    """
    kind = KINDS["kv_cache"]
    sections = [*KINDS, "train", "loader", "launch", "memory", "resume"]
    other = {name: _ELSEWHERE for name in sections if name not in (kind.name, QUANTIZATION)}
    check_sections(config, [kind.name, QUANTIZATION, INFERENCE], other)
    check_interpolations(config)
    chosen = {kind.name: choose(kind, config)}
    if QUANTIZATION in config.tree:
        chosen[QUANTIZATION] = choose(KINDS[QUANTIZATION], config)
    root = with_defaults(config, chosen, {INFERENCE: InferenceSection})
    made: Any = {pick.path[0]: pick.cls(fill(pick.cls.Config, config, pick.path, pick.options, root)) for (pick,) in chosen.values()}
    options = fill(InferenceSection, config, (INFERENCE,), options_in(config, INFERENCE), root)
    return InferenceRecipe(config, made[kind.name], made.get(QUANTIZATION), options)
