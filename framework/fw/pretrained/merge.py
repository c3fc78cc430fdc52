"""An adapter in peft's format (LoRA, DoRA, (IA)³), merged into the weights of its base."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fw.checkpointing.quantized_files import weights_of
from fw.config import parse_size
from fw.errors import UserError
from fw.kinds import make
from fw.kinds.attention import AttentionPlugin
from fw.kinds.model import ModelPlugin
from fw.locate import ADAPTER_CONFIG, CONFIG, find
from fw.place import place
from fw.pretrained.changes import change_of
from fw.pretrained.directory import read_config
from fw.pretrained.export import DTYPE_NAMES, copy_beside
from fw.pretrained.load import write_json, write_weights
from fw.pretrained.new_directory import new_directory
from fw.pretrained.reading import plugin_name

_TIES = "tie_word_embeddings"


@dataclass(frozen=True)
class _Announced:
    shape: tuple[int, ...]
    dtype: torch.dtype


def merge(base: str | Path, adapter: str | Path, to: str | Path, dtype: str | None = None, max_shard_size: str = "5GiB") -> int:
    """Write the model directory ``to``; returns how many tensors the adapter changed.

    One tensor is in memory at a time, as it will be written, and some rows of it in fp32. Where head and embedding were one, and only one
    of them is changed, they are two from then on.

    Args:
        dtype: of floating-point tensors, by name; the base's where None.

    Raises:
        UserError: no such base, an adapter that does not fit it or is of another kind, or ``to`` exists already.
    """
    if dtype is not None and dtype not in DTYPE_NAMES:
        raise UserError(f"--dtype {dtype} is unknown (there are: {', '.join(DTYPE_NAMES)})")
    directory = find(base)
    config = read_config(directory)
    files = weights_of(directory)
    change = change_of(find(adapter, ADAPTER_CONFIG), files, lambda: _heads(directory, config))
    wanted = DTYPE_NAMES[dtype] if dtype else None

    def announced(name: str) -> _Announced:
        found = files.dtype(name)
        return _Announced(files.shape(name), wanted if wanted is not None and found.is_floating_point else found)

    own = {name: change.untied.get(name, name) if name not in files.where else name for name in [*files.where, *change.untied]}
    tensors = {name: announced(of) for name, of in own.items() if name not in change.repeated}

    def value(name: str) -> Tensor:
        weight, kept_as = files.whole(own[name]), tensors[name].dtype
        if name not in change.changed:
            return weight.to(kept_as)
        mine = weight.dtype == kept_as and files.mapped(own[name]) is None
        out = weight if mine else torch.empty(weight.shape, dtype=kept_as)
        change.merge(name, weight, out)
        return out

    with new_directory(Path(to)) as made:
        write_weights(made, tensors, value, parse_size(max_shard_size))
        copy_beside(place(directory), made)
        config.pop("quantization_config", None)  # what was quantized has been made weights of
        if change.untied:
            config[_TIES] = False
        if wanted is not None:
            config = {**{k: v for k, v in config.items() if k != "torch_dtype"}, "dtype": str(wanted).removeprefix("torch.")}
        write_json(made / CONFIG, config)
    return len(change.changed)


def _heads(directory: Path, config: Mapping[str, Any]) -> Mapping[str, str]:
    """Tensors that are not in the model's files because they are others', and which: a head that is the embedding.

    Raises:
        UserError: nobody knows, the architecture being unknown.
    """
    if config.get(_TIES) is False:
        return {}
    try:
        plugin = make(ModelPlugin, "auto" if plugin_name(config) else "hf", path=str(directory))
    except UserError as error:
        raise UserError(f"{error} (asked because the adapter changes an embedding or a head, which may be one tensor)") from None
    assert plugin.vocab_size is not None, "config.json says it, or transformers' default does"
    with torch.device("meta"):
        return plugin.build(plugin.vocab_size, 1, make(AttentionPlugin, "sdpa")).hf_repeated()
