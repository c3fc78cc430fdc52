"""A checkpoint of DeepSpeed's engine as one of fw's: weights, optimizer, and what a resumed run needs where a run of fw's is given."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fw.checkpointing.deepspeed_files import DeepSpeedFiles
from fw.checkpointing.manifest import Digest, hash_file, write_manifest
from fw.checkpointing.state import RNG, STATE
from fw.checkpointing.stream import SafetensorsWriter, Sized, index, split
from fw.config import parse_size
from fw.errors import UserError
from fw.kinds import make
from fw.kinds.attention import AttentionPlugin
from fw.kinds.checkpoint import Part, parts
from fw.kinds.model import CausalLM
from fw.locate import find
from fw.place import place
from fw.pretrained.directory import read_config
from fw.pretrained.export import copy_beside
from fw.pretrained.load import write_json
from fw.pretrained.new_directory import new_directory
from fw.pretrained.reading import plugin_for, plugin_name

MAX_SHARD_SIZE = "5GiB"


@dataclass(frozen=True)
class _Announced:
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


@dataclass
class Group:
    """Tensors that go into one stem's files, and how each is had when its turn comes."""

    tensors: dict[str, Sized] = field(default_factory=dict)
    value: Callable[[str], Tensor] = lambda name: torch.empty(0)


@dataclass(frozen=True)
class Converted:
    """What was written.

    Attributes:
        step: optimizer steps done.
        resumable: whether ``resume`` goes on from it; else it serves as ``model: {weights: …}``.
        notes: what was left out, or assumed, a sentence each.
    """

    step: int
    stage: int
    ranks: int
    weights: int
    states: int
    resumable: bool
    notes: list[str]


def convert(source: Path, to: Path, model: str | None = None, like: str | None = None, tag: str | None = None) -> Converted:
    """Write the step directory ``to`` from a checkpoint directory of DeepSpeed's, one tensor in memory at a time.

    Args:
        model: a model directory, whose configuration and tokenizer are copied and which says what names mean.
        like: a step or run directory of fw's, of the run that is to go on; used like ``model``, and for the trainer's state.
        tag: which of the directory's checkpoints; what its ``latest`` says where None.

    Raises:
        UserError: no such checkpoint, one that cannot be read, names that are not the model's, or ``to`` exists already.
    """
    if model is not None and like is not None:
        raise UserError("--model and --like both say what the model is; give one")
    files = DeepSpeedFiles(source, tag)
    given = like or model
    beside = find(given) if given else None
    weights, states = _as_named(files)
    if beside is not None:
        config = read_config(beside)
        if plugin_name(config) is not None:
            weights, states = _as_model(files, _meta(beside, config), beside)
    trainer: dict[str, Any] = {"step": files.step}
    if like is not None and beside is not None:
        trainer = _trainer(files, beside)
        if not states.tensors:
            raise UserError(f"{files.directory} gives no optimizer state to go on with ({'; '.join(files.notes)}); use --model, not --like")

    def write_beside(made: Path) -> None:
        if beside is not None:
            _copy_beside(beside, made, like is not None)
        write_json(made / STATE, trainer)
        write_json(made / RNG, {})

    write_step(to, {"model": weights, "optimizer": states}, write_beside, {"step": files.step, "world_size": files.ranks})
    counts = len(weights.tensors), len(states.tensors)
    return Converted(files.step, files.stage, files.ranks, *counts, like is not None, files.notes)


def write_step(to: Path, groups: Mapping[str, Group], write_beside: Callable[[Path], None], facts: Mapping[str, Any]) -> None:
    """Write a step directory, which appears when it is whole: tensors by stem, what is beside them, the manifest."""
    with new_directory(to) as made:
        digests: dict[str, Digest] = {}
        for stem, group in groups.items():
            if not group.tensors:
                continue
            files = split(group.tensors, stem, parse_size(MAX_SHARD_SIZE))
            for file, names in files.items():
                writer = SafetensorsWriter(made, file, {name: group.tensors[name] for name in names})
                try:
                    for name in names:
                        writer.write(group.value(name))
                except BaseException:
                    writer.abort()
                    raise
                digests[file] = writer.close()
            if len(files) > 1:
                write_json(made / f"{stem}.safetensors.index.json", index(files, group.tensors))
        write_beside(made)
        written = place(made)
        digests |= {name: hash_file(written, name) for name in written.files() if name not in digests}
        write_manifest(written, digests, {"number": 1, "parent": None, "mesh": {}, "metrics": {}, **facts})


def _as_named(files: DeepSpeedFiles) -> tuple[Group, Group]:
    """By the names they have."""
    weights = {name: files.weight(name) if name in files.integers else _Announced(shape) for name, shape in files.shapes.items()}
    return Group(dict(weights), files.weight), Group({path: _Announced(shape) for path, shape in files.states.items()}, files.state)


def _as_model(files: DeepSpeedFiles, model: CausalLM, beside: Path) -> tuple[Group, Group]:
    """Weights by Hugging Face's names and states by the model's own, whichever of the two the trained module used.

    Raises:
        UserError: names or shapes are those of neither.
    """
    own: dict[str, Tensor] = {name: tensor.detach() for name, tensor in model.stored().items()}
    in_files = parts(model, own)
    by_own = {name: tuple(tensor.shape) for name, tensor in own.items()}
    by_file = {name: part.shape for name, part in in_files.items()}
    extra = [n for n in files.shapes if n not in by_file and (n in model.hf_repeated() or model.hf_superfluous(n))]
    given = {name: shape for name, shape in files.shapes.items() if name not in extra}
    if given not in (by_own, by_file):
        expected = by_own if len(by_own.keys() & given) > len(by_file.keys() & given) else by_file
        differ = sorted(n for n in expected.keys() | given.keys() if expected.get(n) != given.get(n))
        raise UserError(f"{files.directory} is not of the model in {beside}: they differ in {', '.join(differ[:6])}")
    stored = {name: _Announced(part.shape) for name, part in in_files.items()}
    of_own = {of.name: name for name in own for of in model.hf_tensors(name)}

    if given == by_own:
        kept: dict[str, Tensor] = {}

        def weight(name: str) -> Tensor:
            source = of_own[name]
            if source not in kept:  # a stack of experts is several tensors of the file
                kept.clear()
                kept[source] = files.weight(source)
            return in_files[name].whole(kept[source])

        states = {path: _Announced(shape) for path, shape in files.states.items()}
        return Group(dict(stored), weight), Group(dict(states), files.state)

    announced: dict[str, _Announced] = {}
    for path, shape in files.states.items():
        name, _, key = path.rpartition("/")
        if name in of_own:
            announced[f"{of_own[name]}/{key}"] = _Announced(by_own[of_own[name]] if shape == given[name] else ())

    def state(path: str) -> Tensor:
        name, _, key = path.rpartition("/")
        pieces = model.hf_tensors(name)
        if not announced[path].shape:
            return files.state(f"{pieces[0].name}/{key}")
        whole = torch.zeros(by_own[name])
        for piece in pieces:
            part = Part(whole, piece)
            part.whole(whole).copy_(files.state(f"{piece.name}/{key}"))
        return whole

    return Group(dict(stored), files.weight), Group(dict(announced), state)


def _meta(directory: Path, config: Mapping[str, Any]) -> CausalLM:
    """The model without storage."""
    plugin = plugin_for(directory, config)
    assert plugin.vocab_size is not None
    with torch.device("meta"):
        return plugin.build(plugin.vocab_size, 1, make(AttentionPlugin, "sdpa"))


def _trainer(files: DeepSpeedFiles, like: Path) -> dict[str, Any]:
    """The state of the run that goes on, moved to the converted step."""
    path = like / STATE
    try:
        state: dict[str, Any] = json.loads(path.read_text())
        step, samples, tokens = int(state["step"]), int(state["loader"]["samples_seen"]), int(state["tokens"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} holds no state of a run ({type(error).__name__}: {error}); give --like a step of a run") from None
    if step < 1 or samples % step:
        raise UserError(f"{path}: {samples} samples in {step} steps do not say how many a step takes; give --like another step")
    if step != files.step:
        files.notes.append(f"the data goes on at step {files.step}, with {samples // step} samples a step as {like} has them")
    state |= {"step": files.step, "tokens": tokens * files.step // step, "loader": {"samples_seen": samples // step * files.step}}
    if step != files.step:
        state.pop("schedule", None)
    if "loss_scale" in state.get("scalars", {}) and files.loss_scale is not None:
        state["scalars"] = {**state["scalars"], "loss_scale": float(files.loss_scale), "good_steps": 0}
    return state


def _copy_beside(source: Path, made: Path, run: bool) -> None:
    config = {key: value for key, value in read_config(source).items() if key != "torch_dtype"}
    write_json(made / "config.json", {**config, "dtype": "float32"})
    copy_beside(place(source), made, *(path.name for path in source.glob("*.yaml") if run))
