"""LoRA."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import nn

from fw.api import Adapters, CausalLM, HFTensor, Init, LowRank, PeftPlugin, UserError
from fw_plugins.peft.changed import PREFIX, begun_from, cut_along, patterns, refuse_unknown
from fw_plugins.peft.lora_layers import LoraLinear, add_to_embedding, add_to_linear
from fw_plugins.peft.targets import ALL_LINEAR, by_pattern, chosen, matches, names_in_files, shortest

_READ = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"),
    *("bias", "modules_to_save"),
}
_BEGINNING = {
    *("lora_dropout", "init_lora_weights", "fan_in_fan_out", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("qalora_group_size", "ensure_weight_tying"),
}
"""Of training only, or said by the model."""
_MUST_AGREE = {"peft_type": "", "r": 8, "lora_alpha": 8, "use_rslora": False, "use_dora": False, "rank_pattern": {}, "alpha_pattern": {}}
"""What the shapes of an adapter's tensors do not show, and what it means that nothing is said."""


@dataclass
class LoraConfig:
    """How large the change is, and of which layers."""

    rank: int = 8
    """Rows of A and columns of B. A layer of I × O features gets rank · (I + O) parameters that train, each with its gradient and
    optimizer state."""
    alpha: float = 16.0
    """The change is multiplied by alpha / rank. No effect on memory."""
    rslora: bool = False
    """Multiply by alpha / √rank instead, which large ranks want (Kalajdzievski 2023, https://arxiv.org/abs/2312.03732)."""
    dropout: float = 0.0
    """Probability with which an input of A is dropped in training; above 0, backward keeps that input and a mask besides."""
    targets: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """Which layers, by their names in Hugging Face's files: the ends of names as `q_proj` or `layers.0.mlp.up_proj`, regular expressions of
    whole names, or `all-linear`, every linear layer but the head. Embeddings (`embed_tokens`) and the head (`lm_head`) may be named."""
    exclude: list[str] = field(default_factory=list)
    """Which of these not."""
    ranks: dict[str, int] = field(default_factory=dict)
    """Other ranks of some layers, by regular expressions of the ends of their names."""
    alphas: dict[str, float] = field(default_factory=dict)
    """Other alphas of some layers, likewise."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Which biases of the model train too: none, all of them, or those of the layers that have a change."""
    whole: list[str] = field(default_factory=list)
    """Modules that train whole besides, as `embed_tokens` and `lm_head` where a vocabulary was extended: peft's `modules_to_save`. Their
    parameters, gradients and optimizer state are like those of full training."""
    init: Literal["uniform", "normal"] = "uniform"
    """How A begins, B being zero: uniform within ±1/√in (peft's default), or normal with standard deviation 1/rank."""
    adapter: str = ""
    """Directory of an adapter to begin from, of fw's or peft's; empty for a new one. Its configuration must be the one given here."""

    def __post_init__(self) -> None:
        for name, ranks in (("rank", [self.rank]), ("ranks", list(self.ranks.values()))):
            if any(rank < 1 for rank in ranks):
                raise UserError(f"peft.{name}: {min(ranks)} is too small; the least is 1")
        if not 0 <= self.dropout < 1:
            raise UserError(f"peft.dropout: {self.dropout} is not between 0 and 1")
        if not self.targets:
            raise UserError(f"peft.targets: empty, so that nothing would be changed; name layers, or {ALL_LINEAR}")


class Lora(PeftPlugin):
    """LoRA: low-rank changes of linear layers train, all else is frozen; gradients and optimizer state of the changes alone."""

    api = 1
    Config = LoraConfig
    config: LoraConfig
    peft_types: ClassVar[tuple[str, ...]] = ("LORA",)
    magnitudes: ClassVar[bool] = False
    """Whether each changed row has a length of its own that trains."""

    @classmethod
    def from_peft(cls, raw: Mapping[str, Any]) -> PeftPlugin:
        """What changes the result is read, what is of training only is not."""
        refuse_unknown(raw, _READ | _BEGINNING)
        targets, exclude = (raw.get(key) or [] for key in ("target_modules", "exclude_modules"))
        options = LoraConfig(
            rank=raw.get("r", 8),
            alpha=raw.get("lora_alpha", 8),
            rslora=raw.get("use_rslora", False),
            targets=patterns(targets),
            exclude=patterns(exclude),
            ranks=raw.get("rank_pattern") or {},
            alphas=raw.get("alpha_pattern") or {},
            bias=raw.get("bias", "none"),
            whole=list(raw.get("modules_to_save") or []),
        )
        return (Dora if raw.get("use_dora") else Lora)(options)

    def apply(self, model: CausalLM) -> Adapters:
        """A and B beside each weight that the options name."""
        c = self.config
        files = names_in_files(model)
        names = chosen(model, files, c.targets, c.exclude)
        plan = model.tensor_plan()
        model.requires_grad_(False)
        added: dict[str, Init] = {}
        tensors: dict[str, HFTensor] = {}
        split: dict[str, int] = {}
        used = {key: set[str]() for key in ("ranks", "alphas")}
        for name in names:
            in_file = files[name].name
            for key, values in (("ranks", c.ranks), ("alphas", c.alphas)):
                used[key] |= {pattern for pattern in values if by_pattern({pattern: True}, in_file, False)}
            rank = by_pattern(c.ranks, in_file, c.rank)
            scale = by_pattern(c.alphas, in_file, c.alpha) / (math.sqrt(rank) if c.rslora else rank)
            module = model.get_submodule(name)
            for key, init, stored in self._add(module, rank, scale):
                added[f"{name}.{key}"] = init
                tensors[f"{name}.{key}"] = HFTensor(f"{PREFIX}{in_file}.{stored}")
            if plan is not None and isinstance(module, nn.Linear):
                split |= _split(name, plan.split)
        for key, values in (("ranks", c.ranks), ("alphas", c.alphas)):
            if unused := values.keys() - used[key]:
                raise UserError(f"peft.{key}: '{sorted(unused)[0]}' names none of the layers that are changed")
        tensors |= self._whole(model, files) | self._biases(model, names)
        config = self._described(model, files, names)
        norms = {name: name.replace("lora_magnitude_vector", "weight") for name in added if name.endswith("lora_magnitude_vector")}
        because = "the norms of a layer's rows are of the whole layer" if norms else ""
        return Adapters(added, tensors, config, split, begun_from(c.adapter, config, _MUST_AGREE), because, norms)

    def low_rank(self, model: CausalLM) -> Mapping[str, LowRank] | None:
        """All but embeddings, lengths of rows, and what trains whole."""
        changed = {name: module for name, module in model.named_modules() if hasattr(module, "lora_scale")}
        plain = all(type(module) is LoraLinear for module in changed.values())
        if not plain or self.config.bias != "none" or self.config.whole:
            return None
        return {name: LowRank(f"{name}.lora_A", f"{name}.lora_B", module.lora_scale) for name, module in changed.items()}

    def _add(self, module: nn.Module, rank: int, scale: float) -> Iterator[tuple[str, Init, str]]:
        """Names of what is added to a module, how it begins, and what files call it."""
        c = self.config
        if isinstance(module, nn.Embedding):
            if self.magnitudes:
                raise UserError("peft.targets: dora changes linear layers, and no embeddings; use lora, or leave them out")
            add_to_embedding(module, rank, scale)
            yield "lora_embedding_A", Init(), "lora_embedding_A"
            yield "lora_embedding_B", Init(std=1.0), "lora_embedding_B"
            return
        assert isinstance(module, nn.Linear)
        add_to_linear(module, rank, scale, c.dropout, self.magnitudes)
        yield "lora_A", Init(bound=1 / math.sqrt(module.in_features)) if c.init == "uniform" else Init(std=1 / rank), "lora_A.weight"
        yield "lora_B", Init(), "lora_B.weight"
        if self.magnitudes:
            yield "lora_magnitude_vector", Init(value=1.0), "lora_magnitude_vector"

    def _whole(self, model: CausalLM, files: Mapping[str, HFTensor]) -> dict[str, HFTensor]:
        found: dict[str, HFTensor] = {}
        for pattern in self.config.whole:
            modules = [name for name in files if matches(pattern, files[name].name)]
            if not modules:
                ends = dict.fromkeys(files[name].name.rpartition(".")[2] for name in files)
                raise UserError(f"peft.whole: '{pattern}' is no module of this model with a weight (there are: {', '.join(ends)})")
            for module in modules:
                if any(name.startswith("lora_") for name, _ in model.get_submodule(module).named_parameters(recurse=False)):
                    raise UserError(f"peft.whole: '{pattern}' trains whole, and peft.targets changes it besides; name it in one of them")
                found |= _unfrozen(model, [f"{module}.{p}" for p, _ in model.get_submodule(module).named_parameters(recurse=False)])
        return found

    def _biases(self, model: CausalLM, changed: Sequence[str]) -> dict[str, HFTensor]:
        if self.config.bias == "none":
            return {}
        biases = [name for name, _ in model.named_parameters() if name.rpartition(".")[2] == "bias"]
        wrapped = {f"{name}.bias" for name in changed}
        if self.config.bias == "lora_only":
            biases = [name for name in biases if name in wrapped]
        if not biases:
            raise UserError(f"peft.bias: {self.config.bias}, but no such layer of this model has a bias; use none")
        return {
            name: HFTensor(tensor.name.removesuffix("bias") + "base_layer.bias") if name in wrapped else tensor
            for name, tensor in _unfrozen(model, biases).items()
        }

    def _described(self, model: CausalLM, files: Mapping[str, HFTensor], names: Sequence[str]) -> dict[str, Any]:
        """``adapter_config.json``."""
        c = self.config
        whole = [files[name].name for name in files if any(matches(pattern, files[name].name) for pattern in c.whole)]
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "inference_mode": True,
            "r": c.rank,
            "lora_alpha": c.alpha,
            "lora_dropout": c.dropout,
            "use_rslora": c.rslora,
            "use_dora": self.magnitudes,
            "target_modules": shortest([files[name].name for name in names], [files[name].name for name in files]),
            "rank_pattern": dict(c.ranks),
            "alpha_pattern": dict(c.alphas),
            "bias": c.bias,
            "modules_to_save": sorted({name.rpartition(".")[2] for name in whole}) or None,
            "fan_in_fan_out": any(files[name].transposed for name in names),
            "init_lora_weights": True if c.init == "uniform" else "gaussian",
        }


class Dora(Lora):
    """DoRA: LoRA whose changed rows have lengths that train apart; nearer to full training, and slower: norms of all rows in every step."""

    magnitudes = True
    peft_types = ()


def _split(name: str, plan: Mapping[str, int]) -> dict[str, int]:
    """What follows from how a weight is cut: its rows are B's, its columns A's."""
    dim = cut_along(name, plan)
    return {} if dim is None else {f"{name}.lora_B": 0} if dim == 0 else {f"{name}.lora_A": 1}


def _unfrozen(model: CausalLM, names: Sequence[str]) -> dict[str, HFTensor]:
    """Parameters of the model itself that train, and what an adapter's file calls them."""
    found = {}
    for name in names:
        tensors = model.hf_tensors(name)
        if len(tensors) != 1:
            raise UserError(f"peft: {name} is {len(tensors)} tensors in files, which an adapter has no names for; leave it frozen")
        model.get_parameter(name).requires_grad_(True)
        found[name] = HFTensor(PREFIX + tensors[0].name, transposed=tensors[0].transposed)
    return found
