"""What is combined with what: for each part of a run its plugins, as sections of a config, small enough that a run takes two seconds.

Presets of models are their architectures in other sizes, and stand for none of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

import serving
import tokens
from conftest import corpus_text
from models.architectures import VOCABULARY, save

Sections = Mapping[str, Any]
Level = tuple[str, str]
"""Of a part, by their names."""


@dataclass(frozen=True)
class Choice:
    """What a config says to choose a plugin, or a way to use it.

    Attributes:
        beside: what it cannot be without, where nothing else is chosen there.
    """

    sections: Sections
    beside: Sections = field(default_factory=dict)


def _named(kind: str, *names: str, **more: Any) -> dict[str, Choice]:
    return {name: Choice({kind: {"name": name, **more}}) for name in names}


_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_VOCABULARY = 259
"""Of the tokenizer in `base`, and so of everything: a student and its teacher have the same."""
_TARGETS = [r".*\.(o_proj|c_proj)"]
"""Those that have this name and not all layers: fp8 computes the others."""
_LORA = {"peft": {"name": "lora", "targets": _TARGETS}}
_HOST = {"optimizer": "cpu", "gradients": "cpu"}
_FILES = {"tokenizer": "base"}

_CHATS = {"data": {"name": "chat", "files": ["chats.jsonl"], **_FILES}, "train": {"sequence_length": 96}}
_PAIRS = {"data": {"name": "preference", "files": ["pairs.jsonl"], **_FILES}, "train": {"sequence_length": 192}}
"""With room for prompts and answers."""

PARTS: dict[str, dict[str, Choice]] = {
    "model": {
        **_named("model", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "mixtral", "qwen3_moe", **_SIZES),
        **_named("model", "gpt2", n_embd=32, n_layer=2, n_head=4, vocab_size=_VOCABULARY),
        **_named("model", "auto", "hf", path="base"),
    },
    "data": {
        **_named("data", "synthetic", vocab_size=_VOCABULARY, samples=96),
        **_named("data", "text", files=["corpus.txt"], **_FILES),
        **_named("data", "jsonl", files=["texts.jsonl"], **_FILES),
        "chat": Choice(_CHATS),
        "preference": Choice(_PAIRS, {"objective": "dpo", **_LORA}),
    },
    "objective": {
        **_named("objective", "causal_lm"),
        "sft": Choice({"objective": "sft"}, _CHATS),
        "dpo": Choice({"objective": "dpo"}, {**_PAIRS, **_LORA}),
        **_named("objective", "distill", teacher="base"),
    },
    "attention": _named("attention", "sdpa", "eager", "chunked"),
    "activation": {
        **_named("activation", "none", "full", "every_n", "sqrt", "ratio", "selective"),
        **_named("activation", "auto", budget="64KiB"),
        **_named("activation", "modules", patterns=["*.mlp"]),
    },
    "precision": {
        **_named("precision", "fp32", "bf16", "bf16_true", "fp16", "fp8"),
        **_named("precision", "phased", phases=[{"from_step": 0, "compute": "bf16"}, {"from_step": 1, "compute": "fp32"}]),
    },
    "sharding": {
        "single": Choice({"sharding": "single", "launch": {"devices": 1}}),
        **{name: Choice({"sharding": name, "launch": {"devices": 2}}) for name in ("ddp", "fsdp")},
        **{f"zero, stage {stage}": Choice({"sharding": {"name": "zero", "stage": stage}, "launch": {"devices": 2}}) for stage in (1, 2, 3)},
    },
    "optimizer": _named(
        "optimizer",
        *("adafactor", "adamw", "adamw_8bit", "adamw_bf16", "lamb", "lion", "lion_8bit", "muon", "sgd"),
        *("paged_adamw_32bit", "paged_adamw_8bit"),
    ),
    "schedule": _named("schedule", "constant", "cosine", "linear", "wsd"),
    "offload": {
        "nothing": Choice({}),
        "optimizer to the host": Choice({"offload": {"optimizer": "cpu"}}),
        "optimizer to files": Choice({"offload": {"optimizer": "nvme", "path": "away"}}),
        "gradients to the host": Choice({"offload": _HOST}),
        "activations to the host": Choice({"offload": {"activations": "cpu"}}),
        "activations to files": Choice({"offload": {"activations": "nvme", "path": "away"}}),
        "parameters to the host": Choice({"offload": {"params": "cpu", **_HOST}}, {"sharding": "fsdp", "launch": {"devices": 2}}),
    },
    "peft": {
        **_named("peft", "none"),
        **_named("peft", "adapter", "lora", "dora", "ia3", targets=_TARGETS),
        **_named("peft", "prompt", "prefix", tokens=3),
        **_named("peft", "hf_peft", type="LORA", config={"r": 4, "target_modules": _TARGETS[0]}),
    },
    "quantization": {
        **_named("quantization", "none"),
        **{name: Choice({"quantization": name}, _LORA) for name in ("nf4", "fp4", "int8")},
        **{name: Choice({"quantization": {"name": name, "group_size": 16}}, _LORA) for name in ("w4a16", "w8a16")},
        **_named("quantization", "qat", group_size=16),
    },
    "logger": {name: Choice({"logger": [name]}) for name in ("csv", "tensorboard")},
    "checkpoint": _named("checkpoint", "safetensors"),
    "launcher": _named("launcher", "local"),
}

OWN_MODELS = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "mixtral", "qwen3_moe")
GENERATING: dict[str, dict[str, Choice]] = {
    # `auto` is what reads every directory, and `hf` what it does with families that fw does not have.
    "model": {name: Choice({}) for name in (*OWN_MODELS, "auto", "hf")},
    "kv_cache": {
        **_named("kv_cache", "paged", "contiguous"),
        **_named("kv_cache", "quantized", to="int8"),
        **_named("kv_cache", "sliding_window", window=16, sinks=2),
    },
    "quantization": {
        **_named("quantization", "none", "nf4", "fp4", "int8"),
        **_named("quantization", "w4a16", "w8a16", group_size=16),
    },
    "offload": {"nothing": Choice({}), "weights in their files": Choice({"offload": {"params": "nvme"}})},
}
"""Of runs that generate; a model is a directory."""

TRIPLES: Sequence[tuple[Level, ...]] = (
    (("quantization", "nf4"), ("sharding", "fsdp"), ("optimizer", "adamw_8bit")),
    (("quantization", "nf4"), ("activation", "full"), ("optimizer", "paged_adamw_8bit")),
    (("sharding", "fsdp"), ("precision", "bf16"), ("activation", "selective")),
    (("sharding", "fsdp"), ("offload", "parameters to the host"), ("activation", "full")),
    (("sharding", "zero, stage 3"), ("precision", "bf16"), ("offload", "optimizer to the host")),
    (("peft", "lora"), ("objective", "dpo"), ("sharding", "fsdp")),
)
"""Combinations that people ask for by name."""

_BASE: Sections = {
    "model": {"name": "llama", **_SIZES},
    "data": {"name": "synthetic", "vocab_size": _VOCABULARY, "samples": 96},
    "train": {
        "max_steps": 2,
        "global_batch_size": 4,
        "micro_batch_size": 1,
        "sequence_length": 32,
        "val_every": 0,
        "save_every": 2,
        "sample_tokens": 0,
        "run_dir": "run",
    },
    "launch": {"accelerator": "cpu"},
    "logger": ["csv"],
}


def config(row: Mapping[str, str]) -> dict[str, Any]:
    """Of a run that has these; what is said of no part is usual."""
    tree = dict(_BASE)
    chosen = [PARTS[part][name] for part, name in row.items()]
    for sections in (*(choice.beside for choice in chosen), *(choice.sections for choice in chosen)):
        for key, value in sections.items():
            both = isinstance(value, Mapping) and isinstance(tree.get(key), Mapping) and "name" not in value
            tree[key] = {**tree[key], **value} if both else value
    return tree


def generating(row: Mapping[str, str]) -> dict[str, Any]:
    """The config of a run that generates with these."""
    tree: dict[str, Any] = {"inference": {"device": "cpu", "kv_budget": "8MiB"}}
    for part, name in row.items():
        tree |= GENERATING[part][name].sections
    return tree


def prepare(directory: Path) -> None:
    """A model, and files of every form, for all runs."""
    serving.make_model(directory / "base", hidden_size=32, intermediate_size=64)
    (directory / "corpus.txt").write_text(corpus_text())
    said = [(f"what is {n}", f"it is {n}") for n in range(100)]
    lines: dict[str, list[Any]] = {
        "texts": [
            {"prompt": one, "completion": other} if n % 4 == 0 else {"text": f"{one} and {other}. " * (1 + n % 3)}
            for n, (one, other) in enumerate(said)
        ],
        "chats": [{"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]} for a, b in said],
        "pairs": [{"prompt": one, "chosen": other, "rejected": "no"} for one, other in said],
    }
    for name, records in lines.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for name in (*OWN_MODELS, "auto"):
        save("llama" if name == "auto" else name, directory / f"model-{name}")
        tokens.save(directory / f"model-{name}", VOCABULARY)
    olmo = AutoConfig.for_model(
        "olmo2", vocab_size=VOCABULARY, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4
    )
    AutoModelForCausalLM.from_config(olmo).save_pretrained(directory / "model-hf")
    tokens.save(directory / "model-hf", VOCABULARY)
