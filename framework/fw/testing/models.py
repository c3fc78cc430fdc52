"""A small model and a batch, for suites that call a plugin themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fw.checkpointing.placement import fill_from_base, initialise
from fw.kinds import make
from fw.kinds.attention import AttentionPlugin
from fw.kinds.model import CausalLM, ModelPlugin

VOCABULARY, LENGTH = 64, 16


def small_llama(attention: AttentionPlugin | None = None) -> CausalLM:
    """Two blocks on the meta device, two query heads to each key head."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
    return small_llama_of({"name": "llama", **sizes}, VOCABULARY, attention)


def small_llama_of(section: Mapping[str, Any], vocabulary: int, attention: AttentionPlugin | None = None) -> CausalLM:
    """As a config's section says, on the meta device."""
    plugin = make(ModelPlugin, section["name"], **{key: value for key, value in section.items() if key != "name"})
    with torch.device("meta"):
        return plugin.build(vocabulary, LENGTH, attention or make(AttentionPlugin, "eager"))


def with_values(model: CausalLM, seed: int = 0) -> CausalLM:
    """The same on the host, with initial values."""
    model.materialise(torch.device("cpu"))
    for name, parameter in model.named_parameters():
        added = {} if model.adapters is None else model.adapters.added
        initialise(parameter.data, name, added[name] if name in added else model.init(name), seed)
    fill_from_base(model, model.stored(), seed, all_of_them=True)
    return model


def ids(rows: int = 3, seed: int = 0) -> Tensor:
    """``[rows, LENGTH]``."""
    return torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))
