"""How large a model is, told from its shape: parameters, bytes by dtype, keys and values per token."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fw import registry
from fw.errors import UserError, did_you_mean
from fw.kinds import KINDS, make
from fw.kinds.attention import AttentionPlugin
from fw.kinds.model import CausalLM, ModelPlugin
from fw.locate import find
from fw.pretrained.directory import read_config
from fw.pretrained.reading import plugin_for

_KV_DTYPE = torch.bfloat16
_ANY_LENGTH = 1


@dataclass(frozen=True)
class ModelSize:
    """Attributes:
    active_parameters: those that take part in computing one token.
    kv_bytes_per_token: keys and values of one token in bf16 over all blocks, while it is in every block's window.
    windowed_blocks, window: blocks that keep only the last tokens, and the fewest they keep; 0 for none.
    context: longest context the model claims, None where it claims none.
    """

    name: str
    parameters: int
    active_parameters: int
    kv_bytes_per_token: int
    blocks: int
    windowed_blocks: int
    window: int
    context: int | None

    def weight_bytes(self, bits: int) -> int:
        """Bytes of the parameters, each stored in ``bits``."""
        return self.parameters * bits // 8

    def as_json(self) -> dict[str, Any]:
        """All of it, with bytes by dtype."""
        by_dtype = {"fp32": 32, "bf16": 16, "int8": 8, "4bit": 4}
        return {**asdict(self), "weight_bytes": {name: self.weight_bytes(bits) for name, bits in by_dtype.items()}}


def sized_plugins() -> list[str]:
    """Names of the model plugins whose defaults are a complete shape."""
    names = []
    for entry in registry.entries("model"):
        if not registry.inspect(entry).available:
            continue
        try:
            if _default(entry.name).vocab_size is not None:
                names.append(entry.name)
        except UserError:
            continue  # one that must be told something first, such as a path
    return names


def size_of(name: str) -> ModelSize:
    """The size of a model plugin's default shape, or of the model in a directory.

    Raises:
        UserError: neither a plugin nor a directory, or a plugin whose shape has no vocabulary.
    """
    if registry.entries("model", name):
        plugin = _default(name)
        if plugin.vocab_size is None:
            raise UserError(f"model '{name}' has no size of its own; it takes one from a config")
    else:
        if "/" not in name and not Path(name).exists():
            known = [entry.name for entry in registry.entries("model")]
            raise UserError(f"'{name}' is neither a model plugin nor a directory{did_you_mean(name, known)}")
        directory = find(name)
        plugin = plugin_for(directory, read_config(directory))
    assert plugin.vocab_size is not None
    with torch.device("meta"):
        model = plugin.build(plugin.vocab_size, _ANY_LENGTH, _attention())
    return measure(name, model)


def measure(name: str, model: CausalLM) -> ModelSize:
    """The size of a model, wherever it is."""
    shapes = model.kv_shapes
    windows = [shape.window for shape in shapes if shape.window is not None]
    config = model.hf_config()
    return ModelSize(
        name,
        sum(p.numel() for p in model.parameters()),
        model.active_parameters(),
        sum(2 * shape.heads * shape.head_dim for shape in shapes) * _KV_DTYPE.itemsize,
        len(shapes),
        len(windows),
        min(windows, default=0),
        config.get("max_position_embeddings") or config.get("n_positions"),
    )


def _default(name: str) -> ModelPlugin:
    return make(ModelPlugin, name)


def _attention() -> AttentionPlugin:
    kind = KINDS["attention"]
    assert kind.default is not None
    return make(AttentionPlugin, kind.default)
