"""``fw init``: a config for a task, a model and a device, that is predicted to fit and says what each of its options does."""

from __future__ import annotations

import json
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from fw import config as configuration
from fw.config import (
    Config,
    InferenceSection,
    LaunchSection,
    MemorySection,
    ServeSection,
    TrainSection,
    format_size,
    options_of,
    overridden,
)
from fw.errors import UserError, did_you_mean
from fw.kinds import KINDS, plugin_class
from fw.kinds.model import ModelPlugin
from fw.locate import CONFIG, inside
from fw.meter.devices import find
from fw.planning import ask
from fw.planning.generation import gpu_here
from fw.planning.plan import CPU
from fw.recipe.inference import resolve_inference
from fw.registry import entries

TASKS = {
    "pretrain": "a model from nothing, or on from published weights, on plain text",
    "sft": "all of a model, on conversations",
    "lora": "a small part of a model, on conversations",
    "qlora": "the same over a base of 4 bits",
    "dpo": "of two answers the better one, with LoRA",
    "serve": "a model over HTTP",
}
_SECTIONS: Mapping[str, type] = {
    "train": TrainSection,
    "launch": LaunchSection,
    "memory": MemorySection,
    "serve": ServeSection,
    "inference": InferenceSection,
}
_CODES = ("weights in 4 bits", {"quantization": {"name": "nf4", "double_quantization": True}})
_FEWER_BITS: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("weights as they are", {}),
    ("weights in 8 bits", {"inference": {"weights": "int8_weight_only"}}),
    _CODES,
)
"""What serving may take, the first that fits: kernels of the CPU read such weights faster, too."""
_FEWER_BITS_ON_GPU: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("weights as they are", {}),
    ("weights in 8 bits", {"quantization": {"name": "w8a16", "group_size": -1}}),
    _CODES,
    ("weights in 4 bits, partly in host memory", {**_CODES[1], "offload": {"params": "auto"}}),
)
_COLUMNS = 110
_LORA = {"name": "lora", "rank": 16, "alpha": 32, "targets": ["all-linear"]}


@dataclass(frozen=True)
class Wanted:
    """What a config is to be for.

    Attributes:
        model: of fw's presets, a directory, or ``org/name`` of the hub.
        task: of :data:`TASKS`.
        device: as ``fw plan`` has them; None for this machine.
        budget: bytes a rank, like 24GiB; empty for the device's memory.
        data: globs of files.
        ranks: that train or generate, on one host.
        length: of a row; of a sequence that is served, the longest. None for 2,048, and for what the model has.
    """

    model: str
    task: str
    device: str | None = None
    budget: str = ""
    data: tuple[str, ...] = ()
    ranks: int = 1
    length: int | None = None

    @property
    def sequence_length(self) -> int:
        """Of a row."""
        return 2048 if self.length is None else self.length

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise UserError(f"--task: there is no '{self.task}'{did_you_mean(self.task, list(TASKS))}; there are {', '.join(TASKS)}")
        if self.ranks < 1:
            raise UserError(f"--ranks: {self.ranks} is too small; the least is 1")
        if self.task == "serve" and self.data:
            raise UserError("--data: who serves learns from nothing; leave it out")


@dataclass(frozen=True)
class Begun:
    """``text``: the file; ``told``: what was chosen, and why; ``commands``: what may come next, where the file's path is ``{}``."""

    text: str
    told: str
    commands: tuple[str, ...]


def begin(wanted: Wanted) -> Begun:
    """Compose what the task needs, and choose the rest by plan.

    Raises:
        UserError: there is no such model or device, or nothing fits; by how much.
    """
    return _serving(wanted) if wanted.task == "serve" else _training(wanted)


def _training(wanted: Wanted) -> Begun:
    tree = _composed(wanted)
    with tempfile.TemporaryDirectory() as directory:
        stand_in = _stand_in(wanted, tree, Path(directory))
        path = Path(directory) / f"{wanted.task}.yaml"
        path.write_text(yaml.safe_dump(tree, sort_keys=False))
        budget = f"memory.budget={wanted.budget}"
        found = ask.fit(path, stand_in, *([budget] if wanted.budget else []), device=wanted.device)
        if not found.fit.fits:
            least, over = found.fit.best, int(found.fit.best.taken - found.fit.budget)
            other = "another --task (lora, qlora)" if wanted.task in ("pretrain", "sft") else "a shorter --length"
            raise UserError(
                f"nothing fits {format_size(found.fit.budget)}: {least.label} takes least, {format_size(over)} more; a larger --budget,"
                f" more --ranks, {other} or a smaller --model would do"
            )
        # What was chosen, and how ranks that nobody has told so divide the model; not what stood in for data and budget.
        added = [each for each in found.config.overrides if each not in (stand_in, budget)]
        chosen = dict(overridden(configuration.load(path), added).tree)
    if wanted.budget:
        chosen["memory"] = {"budget": wanted.budget, "techniques": []}
    largest, seconds = found.memory.largest, found.memory.step_time
    takes = f"{format_size(largest.taken)} of {format_size(found.fit.budget)} a rank"
    device = found.memory.device
    head = [
        f"{wanted.task}: {TASKS[wanted.task]}. Predicted on {device}: {takes}"
        + (f", {seconds:.2g} s a step at least." if seconds else "."),
        "  fw data preview {}" if wanted.task != "pretrain" else "  fw config {} --origin",
        "  fw train {}",
    ]
    return Begun(_written(head, chosen), repr(found), ("fw train {}",))


def _composed(wanted: Wanted) -> dict[str, Any]:
    """All that the task asks for, and nothing that may be chosen for the memory's sake."""
    model = _model(wanted)
    weights = model.get("path")
    adapts = wanted.task in ("lora", "qlora", "dpo")
    tree: dict[str, Any] = {"model": model}
    if wanted.task == "qlora":
        tree["quantization"] = {"name": "nf4", "double_quantization": True}
    if adapts:
        tree["peft"] = dict(_LORA)
    tree["data"] = _data(wanted, weights)
    tree["objective"] = {"name": "dpo", "beta": 0.1} if wanted.task == "dpo" else {"name": "causal_lm"}
    tree["precision"] = {"name": "bf16" if _has_bf16(wanted) else "fp16"}
    tree["optimizer"] = {"name": "adamw", "lr": {"pretrain": 6e-4, "sft": 1e-5, "dpo": 5e-6}.get(wanted.task, 2e-4)}
    steps = 10_000 if wanted.task == "pretrain" else 500
    tree["schedule"] = {"name": "cosine", "warmup_steps": steps // 20 if wanted.task == "pretrain" else 20}
    tree["train"] = {
        "max_steps": steps,
        "global_batch_size": _multiple(64 if wanted.task == "pretrain" else 16, 8 * wanted.ranks),
        "sequence_length": wanted.sequence_length,
        **({} if wanted.task in ("pretrain", "dpo") else {"packing": True}),
        "gradient_clip_norm": 0.3 if wanted.task == "qlora" else 1.0,
        "val_every": steps // 10,
        "save_every": steps // 5,
    }
    here = {} if wanted.device is None else {"accelerator": CPU if wanted.device == CPU else "cuda"}
    tree["launch"] = {"devices": wanted.ranks, **here}
    return tree


def _has_bf16(wanted: Wanted) -> bool:
    if wanted.device not in (None, CPU):
        return "bfloat16" in find(wanted.device or "", CPU).peak_flops
    return wanted.device == CPU or not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 0)


def _multiple(least: int, of: int) -> int:
    return -(-least // of) * of


def _model(wanted: Wanted) -> dict[str, Any]:
    """A preset by its name; what has files by its path."""
    presets = [entry.name for entry in entries(ModelPlugin.kind)]
    path = Path(wanted.model)
    if wanted.model in presets:
        if wanted.task != "pretrain":
            raise UserError(
                f"--model: {wanted.model} has initial values only, and {wanted.task} begins from weights: give a directory or org/name"
            )
        return {"name": wanted.model}
    if not path.is_dir() and wanted.model.count("/") != 1:
        raise UserError(
            f"--model: {wanted.model} is no directory, no org/name of the hub, and none of fw's models{did_you_mean(wanted.model, presets)}"
        )
    return {"name": "auto", "path": wanted.model}


def _data(wanted: Wanted, weights: str | None) -> dict[str, Any]:
    tokenizer = {"tokenizer": weights} if weights else {"tokenizer": "bpe", "vocab_size": 32000}
    if wanted.task == "pretrain":
        return {"name": "text", "source": "files", "files": list(wanted.data or ("text/**/*.txt",)), **tokenizer}
    if wanted.task == "dpo":
        return {"name": "preference", "files": list(wanted.data or ("pairs.jsonl",)), **tokenizer}
    return {"name": "chat", "files": list(wanted.data or ("chats.jsonl",)), **tokenizer, "learn": "assistant"}


def _stand_in(wanted: Wanted, tree: Mapping[str, Any], directory: Path) -> str:
    """Data for the plan, which may not be there yet: rows as long as they may be."""
    if wanted.task == "pretrain":  # whose rows all have one length
        return f"data={{name: synthetic, vocab_size: {_vocabulary(tree)}}}"
    if wanted.task != "dpo":
        return f"data={{name: synthetic, vocab_size: {_vocabulary(tree)}, min_length: {min(64, wanted.sequence_length)}}}"
    long = "word " * wanted.sequence_length
    pair = {"chosen": long, "rejected": long}
    file = directory / "pairs.jsonl"
    file.write_text("".join(json.dumps({"prompt": str(number), **pair}) + "\n" for number in range(64)))
    section = {"name": "preference", "files": [str(file)], "val_files": [str(file)], "tokenizer": tree["data"]["tokenizer"]}
    return f"data={json.dumps({**section, 'cache_dir': str(directory)})}"


def _vocabulary(tree: Mapping[str, Any]) -> int:
    model = dict(tree["model"])
    cls = plugin_class(ModelPlugin, model.pop("name"))
    return cls(cls.Config(**model)).vocab_size or 32000


def _serving(wanted: Wanted) -> Begun:
    path = Path(wanted.model)
    if path.is_dir() and inside(path, CONFIG) is None:
        raise UserError(f"--model: {path} holds no model")
    if wanted.model in {entry.name for entry in entries(ModelPlugin.kind)}:
        raise UserError(f"--model: {wanted.model} has initial values only; give a directory or org/name")
    if wanted.device is None:
        gpu = gpu_here(resolve_inference(Config("init", {}, {})))
    else:
        gpu = None if wanted.device == CPU else find(wanted.device, CPU)
    inference: dict[str, Any] = {} if wanted.device is None else {"device": CPU if gpu is None else "cuda"}
    inference["dtype"] = "bf16" if gpu is None or "bfloat16" in gpu.peak_flops else "fp16"
    if wanted.ranks > 1:
        inference["tensor"] = wanted.ranks
    if wanted.length is not None:
        inference["max_context"] = wanted.length
    if wanted.budget:
        inference["budget"] = wanted.budget
    tried = []
    for label, changed in _FEWER_BITS if gpu is None else _FEWER_BITS_ON_GPU:
        tree = {
            "serve": {"model": wanted.model},
            **{name: options for name, options in changed.items() if name in ("quantization", "offload")},
            "inference": {**inference, **changed.get("inference", {})},
            "kv_cache": {"name": "paged"},
        }
        words = [f"{name}={json.dumps(options)}" for name, options in tree.items() if name != "serve"]
        try:
            found = ask.plan(wanted.model, *words, device=wanted.device)
        except UserError as error:
            if not changed:
                raise
            tried.append(f"{label}: {error}")  # layers of other sizes than such weights have
            continue
        room = found.generation
        tried.append(f"{label}: {format_size(found.largest.taken)}")
        if found.fits and room is not None and room.largest_context > 0:
            break
    else:
        raise UserError(f"nothing fits {format_size(found.budget or 0)} ({'; '.join(tried)}); a larger --budget, or a smaller model")
    head = [f"serve: {TASKS['serve']}. Predicted on {found.device}: {format_size(found.largest.taken)}.", "  fw serve {}"]
    return Begun(_written(head, tree), repr(found), ("fw serve {}",))


def _written(head: list[str], tree: Mapping[str, Any]) -> str:
    """YAML with a comment at every option: the first sentence of what its documentation says."""
    lines = [f"# {line}" for line in head]
    for section, value in tree.items():
        lines += ["", f"{section}:" if isinstance(value, Mapping) else f"{section}: {_flow(value)}"]
        if not isinstance(value, Mapping):
            continue
        about = _about(section, value)
        for key, inner in value.items():
            lines += [*_comment(about.get(key, "")), f"  {key}: {_flow(inner)}"]
    return "\n".join(lines) + "\n"


def _about(section: str, options: Mapping[str, Any]) -> dict[str, str]:
    """What each option does, by the documentation of its field."""
    if section in _SECTIONS:
        return {option.name: option.doc for option in options_of(_SECTIONS[section])}
    cls = plugin_class(KINDS[section].load_contract(), options.get("name") or KINDS[section].default or "")
    return {"name": _first(cls.__doc__ or ""), **{option.name: option.doc for option in options_of(cls.Config)}}


def _first(text: str) -> str:
    """Its first line, which is what lists of plugins print."""
    return text.strip().splitlines()[0] if text.strip() else ""


def _comment(text: str) -> Iterator[str]:
    return (f"  # {line}" for line in textwrap.wrap(" ".join(text.split()), _COLUMNS))


def _flow(value: Any) -> str:
    """On one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).strip().removesuffix("...").strip()
