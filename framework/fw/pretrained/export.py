"""A checkpoint as a plain model directory, and what can be said of either without reading its weights."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fw.checkpointing import commit
from fw.checkpointing.manifest import MANIFEST, read_manifest
from fw.checkpointing.quantized_files import weights_of
from fw.checkpointing.stream import DTYPES
from fw.checkpointing.tensor_files import ADAPTER, AVERAGE, TensorFiles, has_tensors
from fw.config import parse_size
from fw.errors import UserError
from fw.locate import ADAPTER_CONFIG, CONFIG, find, inside
from fw.place import Place, place
from fw.pretrained.directory import read_config
from fw.pretrained.load import write_json, write_weights
from fw.pretrained.new_directory import new_directory
from fw.pretrained.reading import plugin_name

DTYPE_NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_TOKENIZER = "tokenizer.json"
_COPIED = (
    _TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "additional_chat_templates",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
"""What belongs to a model directory beside configuration and weights."""


@dataclass(frozen=True)
class _Announced:
    shape: tuple[int, ...]
    dtype: torch.dtype


def export(
    source: str | Path, to: str | Path, dtype: str | None = None, max_shard_size: str = "5GiB", average: bool = False
) -> list[tuple[str, int]]:
    """Write the model of a run, a step or a model directory to ``to``, one tensor in memory at a time; of a run that trained adapters
    these, in peft's format.

    Args:
        dtype: of floating-point tensors, and of what was quantized, by name; all as it is stored where None.
        average: of the weights in their place, in the dtype that the configuration names where ``dtype`` is None.

    Returns:
        files of weights and their sizes in bytes.

    Raises:
        UserError: no such model, an unknown dtype or size, or ``to`` exists already.
    """
    if dtype is not None and dtype not in DTYPE_NAMES:
        raise UserError(f"--dtype {dtype} is unknown (there are: {', '.join(DTYPE_NAMES)})")
    max_bytes = parse_size(max_shard_size)
    if max_bytes < 1:
        raise UserError(f"--max-shard-size {max_shard_size} is too small")
    if (adapter := _adapter(source)) is not None:
        return _export_adapter(adapter, Path(to), dtype, average)
    directory = locate(source)
    config = read_config(directory)
    if average:
        files, dtype = _averages(directory), dtype or _name_of(config)
    else:
        files = TensorFiles(directory) if dtype is None else weights_of(directory)
    wanted = DTYPE_NAMES[dtype] if dtype else None

    def cast(found: torch.dtype) -> torch.dtype:
        return wanted if wanted is not None and found.is_floating_point else found

    tensors = {name: _Announced(files.shape(name), cast(files.dtype(name))) for name in files.where}

    def value(name: str) -> Tensor:
        return files.whole(name).to(tensors[name].dtype)

    with new_directory(Path(to)) as made:
        write_weights(made, tensors, value, max_bytes)
        copy_beside(directory, made)
        if wanted is not None:
            config.pop("quantization_config", None)  # what was quantized has been made weights of
            config = {**{k: v for k, v in config.items() if k != "torch_dtype"}, "dtype": str(wanted).removeprefix("torch.")}
        write_json(made / CONFIG, config)
    return [(path.name, path.stat().st_size) for path in sorted(Path(to).glob("*.safetensors"))]


def _adapter(source: str | Path) -> Place | None:
    """Its directory, where the source is one of adapters alone."""
    if "://" in str(source):
        step = locate(source)
        return step if step.has(ADAPTER_CONFIG) and not step.has(CONFIG) else None
    if inside(Path(source), CONFIG) is not None or (found := inside(Path(source), ADAPTER_CONFIG)) is None:
        return None
    return place(found)


def _export_adapter(directory: Place, to: Path, dtype: str | None, average: bool) -> list[tuple[str, int]]:
    own = TensorFiles(directory, ADAPTER)
    files = _averages(directory) if average else own
    wanted = None if dtype is None else DTYPE_NAMES[dtype]
    tensors = {name: _Announced(files.shape(name), wanted or own.dtype(name)) for name in files.where}
    with new_directory(to) as made:
        write_weights(made, tensors, lambda name: files.whole(name).to(tensors[name].dtype), sys.maxsize, ADAPTER)
        copy_beside(directory, made, ADAPTER_CONFIG)
    return [(path.name, path.stat().st_size) for path in to.glob("*.safetensors")]


def _averages(directory: Place) -> TensorFiles:
    if not has_tensors(directory, AVERAGE):
        raise UserError(f"--average: {directory} holds no average of weights; a run with train.ema_decay=0.999 keeps one")
    return TensorFiles(directory, AVERAGE)


def _name_of(config: dict[str, Any]) -> str | None:
    """Of the dtype that a configuration names."""
    named = config.get("dtype", config.get("torch_dtype"))
    return next((name for name, dtype in DTYPE_NAMES.items() if str(dtype) == f"torch.{named}"), None)


def copy_beside(source: Place, made: Path, *more: str) -> None:
    """Copy the tokenizer and its like, and files of further names."""
    for name in source.files():
        if name.split("/")[0] in (*_COPIED, *more):
            (made / name).parent.mkdir(exist_ok=True)
            (made / name).write_bytes(source.read(name))


def describe(directory: str | Path) -> dict[str, Any]:
    """Architecture, parameters, dtypes and files of a directory, from its headers.

    Raises:
        UserError: it holds neither a model nor adapters.
    """
    if (adapter := _adapter(directory)) is not None:
        found, files = adapter, TensorFiles(adapter, ADAPTER)
        config = json.loads(found.read(ADAPTER_CONFIG))
        architecture = f"adapters ({config.get('peft_type')}) of {config.get('base_model_name_or_path') or 'a model that is not named'}"
        plugin = "peft"
    else:
        found = locate(directory)
        files, config = TensorFiles(found), read_config(found)
        architecture = (config.get("architectures") or [config.get("model_type")])[0]
        plugin = plugin_name(config) or "none; model: hf runs transformers' own code"
    parameters = 0
    dtypes: dict[str, dict[str, int]] = {}
    shards = {file: {"tensors": len(names), "bytes": files.directory.size(file)} for file, names in files.files.items()}
    for names in files.files.values():
        for name in names:
            count, dtype = math.prod(files.shape(name)), files.dtype(name)
            parameters += count
            entry = dtypes.setdefault(DTYPES[dtype].lower(), {"tensors": 0, "bytes": 0})
            entry["tensors"] += 1
            entry["bytes"] += count * dtype.itemsize
    training = None
    if found.has(MANIFEST):
        manifest = read_manifest(found)
        training = {"format": manifest.format} | {key: manifest.facts.get(key) for key in ("step", "world_size", "mesh", "metrics")}
    return {
        "directory": str(found),
        "architecture": architecture,
        "plugin": plugin,
        "parameters": parameters,
        "tensors": len(files.where),
        "dtypes": dtypes,
        "shards": shards,
        "tokenizer": found.has(_TOKENIZER),
        "training": training,
    }


def locate(source: str | Path) -> Place:
    """The model directory that a path, a hub repository or a URL means."""
    if "://" in str(source):
        return commit.steps_at(place(source))[0]
    return place(find(source))


def locate_any(source: str | Path) -> Place:
    """The model directory, or the directory of adapters that it means."""
    return _adapter(source) or locate(source)
