"""An adapter read without a model to put it into: low-rank changes of a model's layers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from fw.checkpointing.tensor_files import ADAPTER, TensorFiles, adapter_for
from fw.errors import UserError
from fw.kinds import make
from fw.kinds.attention import AttentionPlugin
from fw.kinds.model import CausalLM, ModelPlugin
from fw.kinds.peft import LowRankChange
from fw.locate import ADAPTER_CONFIG, find
from fw.pretrained.reading import peft_for


def read_low_rank(base: str | Path, adapter: str | Path, attention: AttentionPlugin, dtype: torch.dtype) -> Mapping[str, LowRankChange]:
    """The changes of an adapter by the names of the layers, on the host.

    Args:
        base: directory of the model that it is of.
        adapter: its directory, of fw's or peft's.
        attention: for building the model, of which nothing is computed.

    Raises:
        UserError: there is none, it does not fit the model, or it changes more than linear layers by low rank.
    """
    directory = find(adapter, ADAPTER_CONFIG)
    plugin = make(ModelPlugin, "auto", path=str(base))
    assert plugin.vocab_size is not None
    peft = peft_for(directory)
    with torch.device("meta"):
        model = plugin.build(plugin.vocab_size, 1, attention)
        model.adapters = peft.apply(model)
        layers = peft.low_rank(model)
    refuse_virtual_tokens(model, directory)
    if model.adapters is None or layers is None:
        raise UserError(
            f"{directory} changes more than linear layers by low rank, which several adapters at once cannot; give it as the one adapter,"
            " --adapter, or merge it: fw checkpoint merge"
        )
    tensors = {name: torch.empty(model.get_parameter(name).shape, dtype=dtype) for name in model.adapters.added}
    adapter_for(TensorFiles(directory, ADAPTER), model)(tensors)
    return {name: LowRankChange(tensors[of.down], tensors[of.up], of.scale) for name, of in layers.items()}


def refuse_virtual_tokens(model: CausalLM, adapter: str | Path) -> None:
    """Of a model that is to generate.

    Raises:
        UserError: its adapter, which ``adapter`` names, is one of virtual tokens.
    """
    if model.virtual_tokens:
        what = "an adapter of virtual tokens (peft=prompt, peft=prefix)"
        raise UserError(f"{adapter} is {what}, which generation does not put before prompts; peft's own code generates with it")
