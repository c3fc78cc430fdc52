"""Configurations for `tools/bench accuracy`, drawn by a seed from what a machine without a GPU can measure in seconds."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Value(NamedTuple):
    """What an axis may be: how often beside the others, and what it sets, by dotted key."""

    weight: float
    sets: dict[str, Any]


_PHASES = [{"from_step": 0, "compute": "bf16"}, {"from_step": 2, "compute": "fp32"}]

AXES: dict[str, dict[str, Value]] = {
    "sharding": {
        "single": Value(7, {"sharding": "single"}),
        "ddp 2": Value(1, {"sharding": "ddp", "launch.devices": 2}),
        "fsdp 2": Value(1, {"sharding": "fsdp", "launch.devices": 2}),
        "fsdp 4": Value(1, {"sharding": "fsdp", "launch.devices": 4}),
        "fsdp tensor 2": Value(1, {"sharding": {"name": "fsdp", "tensor": 2}, "launch.devices": 2}),
        "zero 1": Value(1, {"sharding": {"name": "zero", "stage": 1}, "launch.devices": 2}),
        "zero 2": Value(1, {"sharding": {"name": "zero", "stage": 2}, "launch.devices": 2}),
        "zero 3": Value(1, {"sharding": {"name": "zero", "stage": 3}, "launch.devices": 2}),
    },
    "model": {name: Value(1, {}) for name in ("llama", "qwen3", "gpt2", "mixtral", "qwen3_moe")},
    "vocabulary": {
        "4k": Value(1, {"data.vocab_size": 4096}),
        "16k": Value(1, {"data.vocab_size": 16384}),
        "32k": Value(1, {"data.vocab_size": 32000}),
        "50257": Value(1, {"data.vocab_size": 50257}),
    },
    "micro-batch": {str(n): Value(1, {"train.micro_batch_size": n}) for n in (1, 2, 4, 8)},
    "length": {str(n): Value(1, {"train.sequence_length": n}) for n in (128, 256, 384, 512, 768, 1024)},
    "accumulation": {"1": Value(3, {}), "2": Value(1, {}), "3": Value(1, {})},
    "documents": {"blocks": Value(3, {}), "packed": Value(1, {"data.min_length": 16, "train.packing": True})},
    "precision": {
        "fp32": Value(4, {"precision": "fp32"}),
        "bf16": Value(5, {"precision": "bf16"}),
        "bf16_true": Value(3, {"precision": "bf16_true"}),
        "fp8": Value(0.5, {"precision": "fp8"}),
        "phased": Value(0.5, {"precision": {"name": "phased", "phases": _PHASES}}),
    },
    "activation": {
        "none": Value(3, {"activation": "none"}),
        **{name: Value(1, {"activation": name}) for name in ("full", "selective", "every_n", "sqrt", "ratio")},
    },
    "optimizer": {
        "adamw": Value(2, {"optimizer": "adamw"}),
        **{name: Value(1, {"optimizer": name}) for name in ("adamw_8bit", "adamw_bf16", "lion", "adafactor", "muon", "sgd")},
        "in_backward": Value(1, {"optimizer": {"name": "adamw", "in_backward": True}, "train.gradient_clip_norm": 0.0}),
    },
    "peft": {
        "none": Value(6, {}),
        "lora": Value(1, {"peft": {"name": "lora", "rank": 16}}),
        "lora of attention": Value(1, {"peft": {"name": "lora", "rank": 64, "targets": [r".*(q_proj|v_proj|c_attn)"], "dropout": 0.05}}),
        "dora": Value(1, {"peft": {"name": "dora", "rank": 8}}),
        "qlora": Value(1, {"peft": {"name": "lora", "rank": 16}, "quantization": "nf4"}),
    },
    "loss": {
        "whole": Value(2, {}),
        "chunks of 64": Value(1, {"objective.chunk_tokens": 64}),
        "chunks of 256": Value(1, {"objective.chunk_tokens": 256}),
    },
    "attention": {
        "sdpa": Value(3, {"attention": "sdpa"}),
        "eager": Value(1, {"attention": "eager"}),
        "chunked": Value(1, {"attention": {"name": "chunked", "queries": 64}}),
    },
    "offload": {
        "none": Value(4, {}),
        "optimizer": Value(1, {"offload.optimizer": "cpu"}),
        "activations": Value(1, {"offload.activations": "cpu"}),
    },
}
LEAST_PARAMETERS, MOST_PARAMETERS = 10_000_000, 300_000_000
_WORK = 1.4e11
"""Parameters × tokens of a step at most: 6 FLOPs each, at the 100 GFLOP/s and more of two cores, are below 10 seconds."""
_SLOWER = {"fp8": 3}
"""What is emulated takes longer."""
_HEAD = 64


@dataclass(frozen=True)
class Drawn:
    """One configuration.

    Attributes:
        number: among those of the seed, from 0.
        attempt: those before it in this place were refused.
        choices: name of the value of each axis.
        parameters: about how many the model has.
        config: what the YAML file says.
    """

    seed: int
    number: int
    attempt: int
    choices: dict[str, str]
    parameters: int
    config: dict[str, Any] = field(hash=False)

    @property
    def key(self) -> str:
        """Names its place."""
        return f"{self.seed}/{self.number}"

    @property
    def ranks(self) -> int:
        """Processes."""
        return _ranks(self.choices)

    @property
    def steps(self) -> int:
        """That are to be measured: two of each phase, of which the second is like all later ones."""
        precision = self.config["precision"]
        return 2 + (precision["phases"][-1]["from_step"] if isinstance(precision, dict) else 0)

    def label(self) -> str:
        """The configuration in a line: the model, rows of a micro-batch × their tokens, and what is no default."""
        c, train = self.choices, self.config["train"]
        model = self.config["model"]
        width, layers = model.get("hidden_size") or model["n_embd"], model.get("num_hidden_layers") or model["n_layer"]
        batch = f"{train['micro_batch_size']}×{train['sequence_length']}" + (f"×{c['accumulation']}" if c["accumulation"] != "1" else "")
        usual = {"peft": "none", "activation": "none", "attention": "sdpa", "offload": "none", "loss": "whole", "documents": "blocks"}
        words = [f"{c['model']} {self.parameters / 1e6:.0f} M ({layers}×{width}, {c['vocabulary']} ids)", batch]
        words += [c["sharding"], c["precision"], c["optimizer"]]
        words += [_SAID.get(axis, "{}").format(c[axis]) for axis, plain in usual.items() if c[axis] != plain]
        return ", ".join(words)


_SAID = {"loss": "loss in {}", "offload": "{} offloaded"}


def draw(seed: int, number: int) -> list[Drawn]:
    """``number`` configurations. Of every axis each value occurs about as often as its weight says, at least once where there are as many
    configurations as values (Latin hypercube sampling: McKay et al. 1979, https://doi.org/10.1080/00401706.1979.10489755)."""
    chance = random.Random(f"accuracy {seed}")
    decks = {axis: _deck(values, number, chance) for axis, values in AXES.items()}
    sizes = [(place + chance.random()) / number for place in range(number)]
    chance.shuffle(sizes)
    return [
        _drawn(seed, place, 0, {axis: deck[place] for axis, deck in decks.items()}, sizes[place], random.Random(f"shape {seed}/{place}"))
        for place in range(number)
    ]


def redraw(refused: Drawn) -> Drawn:
    """What is tried where a configuration was refused: another of the same sharding, so that the share of each stays."""
    attempt = refused.attempt + 1
    chance = random.Random(f"again {refused.key}/{attempt}")
    choices = {axis: chance.choices(list(values), [value.weight for value in values.values()])[0] for axis, values in AXES.items()}
    choices["sharding"] = refused.choices["sharding"]
    return _drawn(refused.seed, refused.number, attempt, choices, chance.random(), chance)


def _deck(values: Mapping[str, Value], number: int, chance: random.Random) -> list[str]:
    """Names, shuffled: the next one dealt is that which lags furthest behind its weight; those without any come first."""
    total = sum(value.weight for value in values.values())
    dealt = dict.fromkeys(values, 0)
    for _ in range(number):
        behind = {name: (dealt[name] == 0, value.weight / total * number - dealt[name]) for name, value in values.items()}
        dealt[max(behind, key=lambda name: behind[name])] += 1
    deck = [name for name, times in dealt.items() for _ in range(times)]
    chance.shuffle(deck)
    return deck


def _drawn(seed: int, number: int, attempt: int, choices: dict[str, str], size: float, chance: random.Random) -> Drawn:
    if choices["optimizer"] == "in_backward":
        choices["accumulation"] = "1"  # which it needs
    config: dict[str, Any] = {
        "data": {"name": "synthetic", "samples": 4096},
        "launch": {"accelerator": "cpu"},
        "train": {"seed": seed},
    }
    for axis, choice in choices.items():
        for key, value in AXES[axis][choice].sets.items():
            section, _, option = key.partition(".")
            if option:
                config.setdefault(section, {})[option] = value
            else:
                config[section] = value
    model, parameters = shape(choices["model"], config["data"]["vocab_size"], size, chance)
    config["model"] = model
    _bound(config["train"], choices, parameters)
    return Drawn(seed, number, attempt, choices, parameters, config)


def _bound(train: dict[str, Any], choices: dict[str, str], parameters: int) -> None:
    """Batch and length as drawn, or less where a step would take too long: the next shorter lengths to 256, then fewer rows."""
    replicas = _ranks(choices) // (2 if "tensor" in choices["sharding"] else 1)
    accumulation = int(choices["accumulation"])
    most = _WORK / _SLOWER.get(choices["precision"], 1) / parameters / replicas
    while train["micro_batch_size"] * train["sequence_length"] * accumulation > most:
        shorter = [n for n in map(int, AXES["length"]) if n < train["sequence_length"]]
        if shorter and (train["sequence_length"] > 256 or train["micro_batch_size"] == 1):
            train["sequence_length"] = max(shorter)
        elif train["micro_batch_size"] > 1:
            train["micro_batch_size"] //= 2
        elif accumulation > 1:
            accumulation -= 1
        else:
            break
    train["global_batch_size"] = train["micro_batch_size"] * accumulation * replicas
    choices |= {
        "micro-batch": str(train["micro_batch_size"]),
        "length": str(train["sequence_length"]),
        "accumulation": str(accumulation),
    }


def _ranks(choices: Mapping[str, str]) -> int:
    devices: int = AXES["sharding"][choices["sharding"]].sets.get("launch.devices", 1)
    return devices


def shape(name: str, vocabulary: int, size: float, chance: random.Random) -> tuple[dict[str, Any], int]:
    """A model's section, and about how many parameters it has.

    Args:
        size: from 0, for :data:`LEAST_PARAMETERS`, to 1, for :data:`MOST_PARAMETERS`; their logarithm is divided evenly.
    """
    target = LEAST_PARAMETERS * (MOST_PARAMETERS / LEAST_PARAMETERS) ** size
    found: list[tuple[float, dict[str, Any], int]] = []
    for _ in range(50):
        hidden = chance.choice((256, 384, 512, 640, 768, 1024))
        tied = name == "gpt2" or chance.random() < 0.5
        table = vocabulary * hidden * (1 if tied else 2)
        model, block = (_gpt2 if name == "gpt2" else _decoder)(name, hidden, chance)
        layers = min(24, max(2, round((target - table) / block)))
        model |= {"n_layer": layers} if name == "gpt2" else {"num_hidden_layers": layers, "tie_word_embeddings": tied}
        parameters = table + layers * block
        found.append((abs(parameters / target - 1), model, parameters))
        if found[-1][0] < 0.2:
            break
    _, model, parameters = min(found, key=lambda each: each[0])
    return model, parameters


def _gpt2(name: str, hidden: int, chance: random.Random) -> tuple[dict[str, Any], int]:
    return {"name": name, "n_embd": hidden, "n_head": hidden // _HEAD, "vocab_size": None}, 12 * hidden * hidden


def _decoder(name: str, hidden: int, chance: random.Random) -> tuple[dict[str, Any], int]:
    """Section and parameters of a block, of any but gpt2."""
    heads = hidden // _HEAD
    shared = chance.choice([n for n in (1, 2, 3, 4) if heads % n == 0])
    model = {"name": name, "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": heads // shared}
    attention = 2 * hidden * hidden + 2 * hidden * hidden // shared
    if name in ("llama", "qwen3"):
        inner = chance.choice((2, 3, 4)) * hidden
        return {**model, "intermediate_size": inner}, attention + 3 * hidden * inner
    experts = chance.choice((4, 8))
    inner = hidden // 2 * chance.choice((1, 2))
    names = ("num_local_experts", "intermediate_size") if name == "mixtral" else ("num_experts", "moe_intermediate_size")
    routed = dict(zip(names, (experts, inner), strict=True))
    return {**model, **routed, "num_experts_per_tok": 2}, attention + experts * 3 * hidden * inner
