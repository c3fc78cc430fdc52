"""LoRA."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import nn

from fw.api import Adapters, CausalLM, HFTensor, Init, LowRank, NormsOf, PeftPlugin, UserError, plugin_class
from fw_plugins.peft.changed import PREFIX, begun_from, cut_along, patterns, refuse_unknown
from fw_plugins.peft.lora_layers import LoraLinear, add_to_embedding, add_to_linear
from fw_plugins.peft.targets import ALL_LINEAR, by_pattern, chosen, matches, names_in_files, shortest, tied_heads

_READ = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"),
    *("bias", "modules_to_save", "ensure_weight_tying", "target_parameters"),
}
_BEGINNING = {
    *("lora_dropout", "init_lora_weights", "fan_in_fan_out", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    "qalora_group_size",
}
"""Of training only, or said by the model. Ways to begin that alter the base are refused by who reads the file."""
_OF_PEFT = ("lora_bias", "layers_to_transform")
"""What is computed by peft's code: a bias of B, and layers by the numbers of their blocks."""
_NAMED_TIED = {"embed_tokens", "lm_head"}
"""By these names alone does peft know that a module is tied to another (``EMBEDDING_LAYER_NAMES`` there)."""
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
    parameters, gradients and optimizer state are like those of full training. Where the head is the embedding, either name means both."""
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
    as_peft = False
    """Whether the options are those of an adapter that is read, in which peft lets pass what names nothing."""
    as_parameters: Sequence[str] = ()
    """Of an adapter that is read, layers that peft names as parameters: there its patterns are of the weights' names."""
    ties = False
    """Of an adapter that is read, whether peft was to tie what it trained of a head that is the embedding."""

    @classmethod
    def from_peft(cls, raw: Mapping[str, Any]) -> PeftPlugin:
        """What changes the result is read, what is of training only is not. Some options are left to peft's own code."""
        if any(raw.get(key) not in (None, False, []) for key in _OF_PEFT):
            return plugin_class(PeftPlugin, "hf_peft").from_peft(raw)
        refuse_unknown(raw, _READ | _BEGINNING)
        targets, exclude = (raw.get(key) or [] for key in ("target_modules", "exclude_modules"))
        options = LoraConfig(
            rank=raw.get("r", 8),
            alpha=raw.get("lora_alpha", 8),
            rslora=raw.get("use_rslora", False),
            targets=[*patterns(targets), *(as_parameters := _of_parameters(raw.get("target_parameters") or []))],
            exclude=patterns(exclude),
            ranks=raw.get("rank_pattern") or {},
            alphas=raw.get("alpha_pattern") or {},
            bias=raw.get("bias", "none"),
            whole=list(raw.get("modules_to_save") or []),
        )
        made = (Dora if raw.get("use_dora") else Lora)(options)
        made.as_peft, made.as_parameters = True, as_parameters
        made.ties = bool(raw.get("ensure_weight_tying"))
        return made

    def apply(self, model: CausalLM) -> Adapters:
        """A and B beside each weight that the options name."""
        c = self.config
        files = names_in_files(model)
        names = chosen(model, files, c.targets, c.exclude, self.as_peft)
        whole = self._trained_whole(model, files)
        if self.as_peft:  # what trains whole is not changed besides, there
            names = [name for name in names if name not in whole]
        elif both := set(names) & set(whole):
            first = files[min(both)].name
            raise UserError(f"peft.whole: {first} trains whole, and peft.targets changes it besides; name it in one of them")
        modules = _with_parameters(model)
        heads = tied_heads(model)
        tied = {head: of for head, of in heads.items() if of in {files[name].name for name in whole}}
        if self.ties and (both := {files[name].name for name in names} & set(heads.values())):
            raise UserError(
                f"ensure_weight_tying: the change of {min(both)} is the head's, too, which is no layer of this model that could have one;"
                " fw checkpoint merge puts it into the weights"
            )
        plan = model.tensor_plan()
        model.requires_grad_(False)
        added: dict[str, Init] = {}
        tensors: dict[str, HFTensor] = {}
        split: dict[str, int] = {}
        used = {key: set[str]() for key in ("ranks", "alphas")}
        for name in names:
            in_file = files[name].name
            called = model.hf_module_name(in_file)
            told = f"{called}.weight" if any(matches(pattern, called) for pattern in self.as_parameters) else in_file
            for key, values in (("ranks", c.ranks), ("alphas", c.alphas)):
                used[key] |= {pattern for pattern in values if by_pattern({pattern: True}, told, False)}
            rank = by_pattern(c.ranks, told, c.rank)
            scale = by_pattern(c.alphas, told, c.alpha) / (math.sqrt(rank) if c.rslora else rank)
            module = model.get_submodule(name)
            for key, init, stored in self._add(module, rank, scale):
                added[f"{name}.{key}"] = init
                tensors[f"{name}.{key}"] = HFTensor(f"{PREFIX}{in_file}.{stored}")
            if plan is not None and isinstance(module, nn.Linear):
                split |= _split(name, plan.split)
        for key, values in (("ranks", c.ranks), ("alphas", c.alphas)):
            if (unused := values.keys() - used[key]) and not self.as_peft:
                raise UserError(f"peft.{key}: '{sorted(unused)[0]}' names none of the layers that are changed")
        for name in whole:
            tensors |= _unfrozen(model, [f"{name}.{p}" for p, _ in model.get_submodule(name).named_parameters(recurse=False)])
        tensors |= self._biases(model, names)
        config = self._described(files, names, whole, modules, tied) | self._beside_experts(
            model, added, [files[name].name for name in names]
        )
        must_agree = {**_MUST_AGREE, **({"ensure_weight_tying": False} if tied else {})}
        lengths = "lora_magnitude_vector"
        norms = {name: NormsOf(name.replace(lengths, "weight")) for name in added if name.endswith(lengths)}
        because = "the norms of a layer's rows are of the whole layer" if norms else ""
        repeated = {f"{PREFIX}{head}.weight": f"{PREFIX}{of}.weight" for head, of in tied.items()}
        return Adapters(added, tensors, config, split, begun_from(c.adapter, config, must_agree), because, norms, repeated=repeated)

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

    def _trained_whole(self, model: CausalLM, files: Mapping[str, HFTensor]) -> list[str]:
        """Modules that ``whole`` means, by the model's names; a head that is the embedding means that."""
        heads = tied_heads(model)
        tied_in_peft = self.ties and any(name.rpartition(".")[2] in _NAMED_TIED for name in self.config.whole)
        found: dict[str, None] = {}
        for pattern in self.config.whole:

            def means(name: str, pattern: str = pattern) -> bool:
                return name.endswith(pattern) if self.as_peft else matches(pattern, name)

            tied = {of for head, of in heads.items() if means(head)}
            modules = [name for name, of in files.items() if means(of.name) or of.name in tied]
            if not modules and not self.as_peft:
                ends = dict.fromkeys(files[name].name.rpartition(".")[2] for name in files)
                raise UserError(f"peft.whole: '{pattern}' is no module of this model with a weight (there are: {', '.join(ends)})")
            for module in modules:
                if self.as_peft and not tied_in_peft and files[module].name in heads.values():
                    raise UserError(
                        f"modules_to_save: {pattern} is both embedding and head of this model, which peft trains apart unless"
                        f" ensure_weight_tying is true and {' or '.join(sorted(_NAMED_TIED))} is named; fw checkpoint merge makes a model"
                        " in which they are two"
                    )
            found |= dict.fromkeys(modules)
        return list(found)

    def _beside_experts(self, model: CausalLM, added: Mapping[str, Init], changed: Sequence[str]) -> dict[str, Any]:
        """Of a mixture of experts, what ``adapter_config.json`` says of changed layers that peft would take for experts by their last
        names: routers, and layers of blocks without experts, named as parameters. Of these peft knows no dropout, not even to read them.

        Args:
            added: parameters that no file of the model has.
            changed: in files.
        """
        own = [name for name in model.base() if name not in added]
        experts = [of.name.removesuffix(".weight") for name in own for of in model.hf_tensors(name) if of.index is not None]
        places, ends = {name.partition(".experts.")[0] for name in experts}, {name.rpartition(".")[2] for name in experts}
        apart = {name for name in changed if name.rpartition(".")[0] in places or name.rpartition(".")[2] in ends}
        if not apart:
            return {}
        layers = [of.name for of in names_in_files(model).values()]
        told = shortest([model.hf_module_name(name) for name in apart], [model.hf_module_name(name) for name in layers])
        found: dict[str, Any] = {
            "target_modules": shortest([name for name in changed if name not in apart], layers),
            "target_parameters": [f"{name}.weight" for name in told],
            "lora_dropout": 0.0,
        }
        for key, values in (("rank_pattern", self.config.ranks), ("alpha_pattern", self.config.alphas)):
            of_weights = {rf"({pattern})\.weight": value for pattern, value in values.items()}
            used = [pattern for pattern in of_weights if any(by_pattern({pattern: True}, f"{name}.weight", False) for name in apart)]
            found[key] = {**values, **{pattern: of_weights[pattern] for pattern in used}}
        return found

    def _biases(self, model: CausalLM, changed: Sequence[str]) -> dict[str, HFTensor]:
        if self.config.bias == "none":
            return {}
        biases = [name for name, _ in model.named_parameters() if name.rpartition(".")[2] == "bias"]
        wrapped = {f"{name}.bias" for name in changed}
        if self.config.bias == "lora_only":
            biases = [name for name in biases if name in wrapped]
        if not biases and not self.as_peft:
            raise UserError(f"peft.bias: {self.config.bias}, but no such layer of this model has a bias; use none")
        return {
            name: HFTensor(tensor.name.removesuffix("bias") + "base_layer.bias") if name in wrapped else tensor
            for name, tensor in _unfrozen(model, biases).items()
        }

    def _described(
        self,
        files: Mapping[str, HFTensor],
        names: Sequence[str],
        trained_whole: Sequence[str],
        modules: Iterable[str],
        tied: Iterable[str],
    ) -> dict[str, Any]:
        """``adapter_config.json``.

        Args:
            names, trained_whole: in the model, of layers that are changed, and of modules that train whole.
            modules: in files, of all that have parameters.
            tied: of these, heads that are an embedding which trains whole.
        """
        c = self.config
        whole = [files[name].name for name in trained_whole]
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
            "modules_to_save": sorted({*_ends(whole, modules), *tied}) or None,
            **({"ensure_weight_tying": True} if tied else {}),
            "fan_in_fan_out": any(files[name].transposed for name in names),
            "init_lora_weights": True if c.init == "uniform" else "gaussian",
        }


class Dora(Lora):
    """DoRA: LoRA whose changed rows have lengths that train apart; nearer to full training, and slower: norms of all rows in every step."""

    magnitudes = True
    peft_types = ()


def _of_parameters(names: Sequence[str]) -> list[str]:
    """The layers whose weights they are.

    Raises:
        UserError: a parameter is no layer's weight.
    """
    if others := [name for name in names if not name.endswith(".weight")]:
        raise UserError(
            f"target_parameters: {', '.join(sorted(others))} are stacked experts, whose changes are not computed here; have peft merge them"
            " (merge_and_unload), and take the model that this makes"
        )
    return [name.removesuffix(".weight") for name in names]


def _split(name: str, plan: Mapping[str, int]) -> dict[str, int]:
    """What follows from how a weight is cut: its rows are B's, its columns A's."""
    dim = cut_along(name, plan)
    return {} if dim is None else {f"{name}.lora_B": 0} if dim == 0 else {f"{name}.lora_A": 1}


def _with_parameters(model: CausalLM) -> set[str]:
    """Names in files of all modules that have parameters of their own."""
    return {tensor.name.rpartition(".")[0] for name in model.base() for tensor in model.hf_tensors(name)}


def _ends(names: Iterable[str], others: Iterable[str]) -> set[str]:
    """Module names as ``modules_to_save`` lists them, which means whatever ends so, be it in the middle of a word: their last parts
    where these are no end of another's name."""
    names = set(names)
    ends = {name: name.rpartition(".")[2] for name in names}
    return {name if any(other.endswith(end) for other in set(others) - names) else end for name, end in ends.items()}


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
