"""A model directory as a module, and a module as a model directory."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fw.bars import Bar
from fw.checkpointing.elsewhere import allocate, announce, check_host, chosen_elsewhere
from fw.checkpointing.placement import fill_from_base, quantizing
from fw.checkpointing.quantized_files import quantization_for, weights_of
from fw.checkpointing.stream import SafetensorsWriter, Sized, index, size_bytes, split
from fw.checkpointing.streaming import stream
from fw.checkpointing.tensor_files import ADAPTER, TensorFiles, adapter_for, weights_for
from fw.config import parse_size
from fw.errors import UserError
from fw.kinds import make, plugin_class
from fw.kinds.attention import AttentionPlugin
from fw.kinds.checkpoint import parts
from fw.kinds.model import CausalLM, HFTensor, ModelPlugin
from fw.kinds.offload import OffloadPolicy
from fw.kinds.quantization import QuantizationPlugin
from fw.locate import ADAPTER_CONFIG, CONFIG, find, inside
from fw.meter.memory import available_bytes
from fw.planned import is_gpu
from fw.pretrained.directory import named_base
from fw.pretrained.division import Division
from fw.pretrained.new_directory import new_directory
from fw.pretrained.reading import peft_for

if TYPE_CHECKING:
    from fw.tokenizer import Tokenizer

MAX_SHARD_SIZE = "5GiB"
_HOST = torch.device("cpu")


def load_model(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    attention: str | AttentionPlugin = "sdpa",
    model: str = "auto",
    adapter: str | Path | None = None,
    quantization: str | QuantizationPlugin | None = None,
    offload: OffloadPolicy | None = None,
    division: Division | None = None,
) -> CausalLM:
    """The model of a directory in evaluation mode; ``model(ids)`` maps ids ``[B, L]`` to logits ``[B, L, V]``.

    Weights go from the mapped files straight to their place; nothing is held twice.

    Args:
        path: a model directory, a run of fw's own (its latest checkpoint), or ``org/name`` of the hub. Where it is an adapter's, its
            base is loaded with it, from where its configuration says.
        dtype: of the parameters, whatever the files hold.
        attention: an attention plugin, or its name.
        model: a model plugin that takes a ``path``: ``auto`` picks a reference architecture, ``hf`` runs transformers' own code.
        quantization: a quantization plugin, or its name: weights are quantized one after another as they are read, and codes that files
            hold are taken as they are. ``none`` makes weights of them; None leaves them as they are.
        adapter: directory of an adapter of the model at ``path``, of fw's or peft's; it stays beside the weights.
        offload: whose ``params`` of ``nvme`` leave weights in their files, mapped: as many as ``budget`` and ``modules`` say. On a GPU they
            are brought there block by block, and ``cpu`` keeps them in page-locked memory of the host.
        division: of layers between ranks; the model is this rank's part of it, which computes nothing right by itself.

    Raises:
        UserError: no such model, an architecture or a field that is not honoured, or weights that do not fit.
    """
    made, weights, directory = structure(path, dtype, attention, model, adapter, quantization)
    filling = weights_for(weights_of(weights), made)
    place = torch.device(device)
    away = chosen_elsewhere(made, weights, is_gpu(place), offload)
    check_host(away, available_bytes(_HOST))
    put = adapter_for(TensorFiles(directory, ADAPTER), made) if directory is not None else None
    if division is not None:
        division.cut(made)
    announce(made, away, is_gpu(place))
    allocate(made)
    made.materialise(place)
    tensors, added = made.stored(), made.adapters.added if made.adapters is not None else {}
    own = {n: t for n, t in tensors.items() if n not in added and n not in made.in_files}
    pieces: Callable[[Mapping[str, Tensor]], Iterable[Mapping[str, Any]]] = (lambda those: [those]) if division is None else division.pieces
    fill = quantizing(filling, made, filling.codes, filling.done)
    for some in pieces(own):
        fill(some)
    if put is not None:
        for some in pieces(tensors):
            put(some)
    fill_from_base(made, tensors)
    if division is not None:
        division.finish(made)
    stream(made, place)
    return made.eval()


def structure(
    path: str | Path,
    dtype: torch.dtype,
    attention: str | AttentionPlugin = "sdpa",
    model: str = "auto",
    adapter: str | Path | None = None,
    quantization: str | QuantizationPlugin | None = None,
) -> tuple[CausalLM, Path, Path | None]:
    """The model of a directory on the meta device, the directory of its weights, and that of its adapter.

    Args:
        path: as for :func:`load_model`, and all others.

    Raises:
        UserError: no such model, or an architecture or a field that is not honoured.
    """
    model_cls = plugin_class(ModelPlugin, model)
    if "path" not in {field.name for field in dataclasses.fields(model_cls.Config)}:
        raise UserError(f"model '{model}' takes no path, so no directory can be loaded with it; use auto or hf")
    if adapter is None and inside(Path(path), CONFIG) is None and (found := inside(Path(path), ADAPTER_CONFIG)):
        adapter = found
        path = named_base(found)
    plugin = model_cls(model_cls.Config(path=str(path)))
    assert plugin.weights is not None
    chosen = make(AttentionPlugin, attention) if isinstance(attention, str) else attention
    given = quantization_for(plugin.weights) if quantization is None else None
    chosen_bits = quantization if isinstance(quantization, QuantizationPlugin) else make(QuantizationPlugin, quantization or "none")
    quantized = given or chosen_bits
    assert plugin.vocab_size is not None, "config.json says it, or transformers' default does"
    with torch.device("meta"):
        made = plugin.build(plugin.vocab_size, 1, chosen)
        made.quantized, made.quantization = quantized.apply(made, dtype), quantized
        directory = None if adapter is None else find(adapter, ADAPTER_CONFIG)
        if directory is not None:
            made.adapters = peft_for(directory).apply(made)
        made.to(dtype)
    return made, plugin.weights, directory


def save_model(
    model: CausalLM, path: str | Path, tokenizer: Tokenizer | None = None, *, max_shard_size: str = MAX_SHARD_SIZE, overwrite: bool = False
) -> Path:
    """Write a model directory that transformers and :func:`load_model` read: config.json, safetensors, and the tokenizer's files.

    Raises:
        UserError: there is something at ``path`` already, and it is not to be overwritten; files cannot hold what is quantized; the model
            has an adapter, which a directory of its own holds.
    """
    if model.adapters is not None:
        raise UserError(
            "the model has an adapter, which a model directory cannot hold; fw checkpoint merge puts it into the weights, and without it"
            " they are those of its base"
        )
    stored = {name: tensor.detach() for name, tensor in model.stored().items()}
    codes = {name for weight in model.quantized.values() for name in weight.kept}
    tensors = parts(model, {name: tensor for name, tensor in stored.items() if name not in codes})
    quantized = _in_files(model, stored)

    def value(name: str) -> Tensor:
        if name in quantized:
            return quantized[name]
        tensor = tensors[name].tensor
        assert isinstance(tensor, Tensor)
        return tensors[name].whole(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor)

    config = {**model.hf_config(), "dtype": str(next(iter(tensors.values())).dtype).removeprefix("torch.")}
    if quantized:
        assert model.quantization is not None
        config["quantization_config"] = dict(model.quantization.hf_config(model))
    with new_directory(Path(path), overwrite) as directory:
        write_weights(directory, {**tensors, **quantized}, value, parse_size(max_shard_size))
        write_json(directory / "config.json", config)
        if tokenizer is not None:
            tokenizer.save(directory)
    return Path(path)


def _in_files(model: CausalLM, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is quantized, as files hold it."""
    found: dict[str, Tensor] = {}
    for name, weight in model.quantized.items():
        assert model.quantization is not None
        found |= model.quantization.written(file_name(model, name), weight, {part: values[part] for part in weight.kept})
    return found


def file_name(model: CausalLM, name: str) -> str:
    """What files call a weight that is quantized.

    Raises:
        UserError: it is no tensor of its own there.
    """
    of = model.hf_tensors(name)
    if len(of) != 1 or of[0] != HFTensor(of[0].name):
        raise UserError(
            f"{name} is no tensor of its own in files, which hold nothing quantized but that; save the model without quantization"
        )
    return of[0].name


def write_weights(
    directory: Path, tensors: Mapping[str, Sized], value: Callable[[str], Tensor], max_bytes: int, stem: str = "model"
) -> None:
    """Write ``<stem>*.safetensors`` and, for several files, their index, one tensor in memory at a time.

    Args:
        tensors: shapes and dtypes by name, in the order of the files.
        value: gives a tensor when its turn comes.
    """
    files = split(tensors, stem, max_bytes)
    total = sum(size_bytes(tensor) for tensor in tensors.values())
    with Bar(total=total, desc="writing weights", unit="B", unit_scale=True) as bar:
        for file, names in files.items():
            writer = SafetensorsWriter(directory, file, {name: tensors[name] for name in names})
            try:
                for name in names:
                    writer.write(value(name))
                    bar.update(size_bytes(tensors[name]))
            except BaseException:
                writer.abort()
                raise
            writer.close()
    if len(files) > 1:
        write_json(directory / f"{stem}.safetensors.index.json", index(files, tensors))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object, indented as transformers does."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
