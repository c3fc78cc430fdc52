"""Methods of the peft library, nearly all by its own code.

peft puts a layer of its own in the place of each linear layer that it changes, and the layer there was inside. Here it stays where it was,
under its name, and peft's is inside: computing what the layer did before goes through a second object with the same parameters.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from fw.api import Adapters, CausalLM, FromBase, HFTensor, Init, LowRank, NormsOf, PeftPlugin, UserError
from fw_plugins.peft.changed import OF_TRAINING, begun_from, patterns
from fw_plugins.peft.hf_peft_layers import ADAPTER, INSIDE, Made, OfPeft, OfWeight, Plain, put_inside
from fw_plugins.peft.norms import train_norms
from fw_plugins.peft.targets import ALL_LINEAR, by_pattern, chosen, names_in_files, shortest

SHARING = ("VERA", "PVERA", "RANDLORA", "VBLORA", "UNILORA")
"""Methods whose layers share tensors, so that all are made together."""
_BY_VALUES = (*SHARING, "SHIRA", "BOFT")
"""Methods of which peft computes something while it makes layers, so that these are made on the host."""
FROM_WEIGHTS = ("PSOFT", "SUPERTUNING")
"""Methods that begin from the weights that they change, each layer from its own."""
REFUSED: Mapping[str, str] = {
    "ADALORA": "its ranks change by calls between steps",
    "ADAMSS": "how many parameters it has depends on the weights that it changes, so that no plan can know its memory",
    "ADAPTION_PROMPT": "it changes attention, and no linear layers",
    "FROD": "it factorizes the weights of all layers of a kind together, which are never in one place",
    "LILY": "what it computes of a token depends on all tokens of the batch, later ones among them",
    "OSF": "it changes gradients as they come, of whole parameters that ranks divide",
    "POLY": "it needs the number of a task with every row",
    "SHADOW": "it trains a network beside the model",
    "TINYLORA": "it factorizes the weights of all layers at once, to share a vector between them",
    "TRAINABLE_TOKENS": "it trains rows of embeddings; use peft=lora with peft.whole",
    "XLORA": "it mixes adapters that are there already",
}
"""Methods of peft that are not taken, and why, as a clause."""

_WHERE = {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out"}
"""Options that say which layers, and how files hold their weights."""
_TRANSPOSED = ("LORA", "GRALORA", "HIRA", "DEFT", "FOURIERFT", "WAVEFT", *SHARING)
"""Methods that change weights which files hold transposed: GPT-2's."""
_LORA = {
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "init_lora_weights", "rank_pattern", "alpha_pattern", "use_dora", "lora_bias"),
    *("qalora_group_size", "ensure_weight_tying"),  # which mean nothing by themselves
}
"""Options of LORA that layers by themselves honour."""
_NORMS = {"lora_magnitude_vector": 1, "delora_w_norm": 0}
"""Parameters of methods that begin as norms of the weight, along which dimension."""
_LORA_BEGINNINGS = (True, False, "gaussian", "orthogonal")
"""Values of ``init_lora_weights`` that leave the base as it is and do not look at it."""
_NOT_ALONE: Mapping[str, Mapping[str, str]] = {
    "OFT": {"coft": "it writes to its parameters in forward"},
    "WAVEFT": {"proportional_parameters": "it looks at all layers at once; use n_frequency_pattern"},
    "VBLORA": {"save_only_topk_weights": "such files can train no further"},
    "PVERA": {
        "sample_at_inference": "one prompt would have many answers",
        "generator_seed": "a run that goes on would draw the same again",
    },
}
"""Options that need more than their layer, by method, and why."""
_OF_TRAINING_ALONE = {"generator_seed"}
"""Of these what does not matter to an adapter that is read."""


@dataclass
class HFPeftConfig:
    """A method of the peft library, with its own options."""

    type: str = "LOHA"
    """`peft_type` of a method that changes linear layers: LOHA, LOKR, HRA, MISS, C3A, ROAD, GRALORA, OFT, FOURIERFT, WAVEFT, HIRA, DEFT,
    PEANUT, BEFT, BOFT, VERA, PVERA, RANDLORA, VBLORA, UNILORA, DELORA, GLORA, SHIRA, PSOFT, SUPERTUNING, or LORA and IA3 with options
    that `lora` and `ia3` have not; or LN_TUNING, which trains norms."""
    config: dict[str, Any] = field(default_factory=dict)
    """Options of its configuration class in peft (`LoHaConfig`, …), among them `target_modules`, `all-linear` where it says none, and
    `exclude_modules`."""
    adapter: str = ""
    """Directory of an adapter to begin from, of fw's or peft's; empty for a new one. Its configuration must be the one given here."""


class HFPeft(PeftPlugin):
    """A method of the peft library that changes linear layers or norms, by its own configuration."""

    api = 1
    Config = HFPeftConfig
    config: HFPeftConfig
    packages = {"peft": "peft>=0.21"}  # noqa: RUF012
    peft_types: ClassVar[tuple[str, ...]] = (
        "LOHA",
        "LOKR",
        "HRA",
        "MISS",
        "C3A",
        "ROAD",
        "GRALORA",
        "OFT",
        "FOURIERFT",
        "WAVEFT",
        "HIRA",
        "DEFT",
        "PEANUT",
        "BEFT",
        "BOFT",
        "VERA",
        "PVERA",
        "RANDLORA",
        "VBLORA",
        "UNILORA",
        "DELORA",
        "GLORA",
        "SHIRA",
        "PSOFT",
        "SUPERTUNING",
        "LN_TUNING",
    )
    as_peft = False
    """Whether it is as an adapter's file says, which then has all values."""

    @classmethod
    def from_peft(cls, raw: Mapping[str, Any]) -> PeftPlugin:
        """As the method's own class reads it."""
        of_training = (OF_TRAINING - {"layers_pattern"}) | {"peft_type"}
        plugin = cls(HFPeftConfig(type=str(raw.get("peft_type")), config={k: v for k, v in raw.items() if k not in of_training}))
        plugin.as_peft = True
        return plugin

    def apply(self, model: CausalLM) -> Adapters:
        """Make a layer of peft's for each linear layer that the options name, and put it inside."""
        options = self._options()
        if self.config.type == "LN_TUNING":
            return self._norms(model, options)
        begins = not self.as_peft and not self.config.adapter
        by_norms = "use_dora" if getattr(options, "use_dora", False) else "DELORA" if self.config.type == "DELORA" else ""
        method, from_weights = self.config.type, _from_weights(options)
        files = names_in_files(model)
        names = self._names(model, files, options)
        if begins and by_norms and (coded := [files[name].name for name in names if f"{name}.weight" in model.quantized]):
            raise UserError(
                f"peft: {by_norms} begins with norms of weights, of which {coded[0]} keeps codes; leave it out, or begin from an adapter"
                " that peft has made (peft.adapter)"
            )
        if from_weights and (coded := [files[name].name for name in names if f"{name}.weight" in model.quantized]):
            raise UserError(f"peft: {method} takes what it is from weights, of which {coded[0]} keeps codes; use another method, or none")
        model.requires_grad_(False)
        plain = [_plain(files[name].name, model.get_submodule(name)) for name in names]
        if begins:
            _divides(options, plain)
        added: dict[str, Init] = {}
        tensors: dict[str, HFTensor] = {}
        fixed: dict[str, Callable[[], Tensor]] = {}
        from_base: dict[str, FromBase] = {}
        repeated: dict[str, str] = {}

        def found(of: OfPeft, prefix: str, in_files: Mapping[str, str], buffers: Mapping[str, str], made: Made) -> None:
            for inner, name in in_files.items():
                here = f"{prefix}{INSIDE}.{inner}"
                added[here] = Init() if from_weights else Init(values=partial(of.drawn, name))
                if name in made.in_files:
                    tensors[here] = HFTensor(made.in_files[name])
                if from_weights:
                    from_base[here] = OfWeight(f"{prefix}weight", partial(of.computed, name, here))
                elif (dim := _NORMS.get(inner.partition(".")[0])) is not None:
                    from_base[here] = NormsOf(f"{prefix}weight", dim)
            fixed.update({f"{prefix}{INSIDE}.{inner}": partial(of.fixed, name) for inner, name in buffers.items()})

        together = method in SHARING
        for group in [range(len(names))] if together else [[each] for each in range(len(names))]:
            of = OfPeft(options, [plain[each] for each in group])
            made = of.made("cpu" if method in _BY_VALUES else "meta", computed=from_weights)
            repeated |= made.repeated
            if made.shared:
                model.add_module(INSIDE, _holding(made.shared))
                found(of, "", made.of_all(made.in_files), made.of_all(made.fixed), made)
            for each in group:
                name, called = names[each], plain[each].name
                kept = model.quantized.get(f"{name}.weight")
                put_inside(model.get_submodule(name), made.layers[called], None if kept is None else kept.dtype)
                kept_here = made.own(called, (*made.in_files, *made.besides))
                found(of, f"{name}.", kept_here, made.own(called, made.fixed), made)
        config = {k: sorted(v) if isinstance(v, set) else v for k, v in options.to_dict().items() if k not in OF_TRAINING}
        config |= {"task_type": "CAUSAL_LM", "inference_mode": True}
        # By name, as a file's reader finds them whatever the patterns were.
        config["target_modules"] = shortest([files[name].name for name in names], [of.name for of in files.values()])
        config |= {key: None for key in ("exclude_modules", "layers_to_transform") if key in config}
        if method == "IA3":
            config |= _of_ia3(options, [files[name].name for name in names])
        if "fan_in_fan_out" in config:
            config["fan_in_fan_out"] = any(files[name].transposed for name in names)
        begun = begun_from(self.config.adapter, config, _shows(options, config))
        return Adapters(
            added, tensors, config, {}, begun, "the peft library computes whole layers", from_base, fixed=fixed, repeated=repeated
        )

    def low_rank(self, model: CausalLM) -> Mapping[str, LowRank] | None:
        """Of LORA, where nothing else is added: no bias of B, no norms, no other way to compute."""
        from peft.tuners.lora.layer import Linear

        found: dict[str, LowRank] = {}
        for name, module in model.named_modules():
            inside = module._modules.get(INSIDE)
            if type(inside) is Linear and not inside.lora_variant:
                down, up = (f"{name}.{INSIDE}.{each}.{ADAPTER}.weight" for each in ("lora_A", "lora_B"))
                found[name] = LowRank(down, up, inside.scaling[ADAPTER])
        assert model.adapters is not None
        theirs = {each for of in found.values() for each in (of.down, of.up)}
        return found if theirs == model.adapters.added.keys() == model.adapters.tensors.keys() else None

    def _norms(self, model: CausalLM, options: Any) -> Adapters:
        tensors, names = train_norms(model, patterns(options.target_modules), patterns(options.exclude_modules), self.as_peft)
        config = {k: v for k, v in options.to_dict().items() if k not in OF_TRAINING}
        config |= {"task_type": "CAUSAL_LM", "inference_mode": True, "target_modules": sorted(names), "exclude_modules": None}
        return Adapters({}, tensors, config, {}, begun_from(self.config.adapter, config, {"peft_type": ""}))

    def _names(self, model: CausalLM, files: Mapping[str, HFTensor], options: Any) -> list[str]:
        """Of the layers that are changed, in the model.

        Raises:
            UserError: an option names nothing, or what cannot be changed.
        """
        left_out = patterns(getattr(options, "exclude_modules", None))
        names = chosen(model, files, patterns(options.target_modules or ALL_LINEAR), left_out, self.as_peft)
        if getattr(options, "layers_to_transform", None) is not None:
            names = _of_blocks(names, files, options)
        if strangers := [files[name].name for name in names if not isinstance(model.get_submodule(name), nn.Linear)]:
            raise UserError(f"peft.config: {strangers[0]} is no linear layer, which is all that is changed")
        if self.config.type not in _TRANSPOSED and (turned := [files[name].name for name in names if files[name].transposed]):
            raise UserError(
                f"peft.type: {self.config.type} changes no weights that files hold transposed, as they do {turned[0]}; use one of"
                f" {', '.join(_TRANSPOSED)}"
            )
        for key, values in vars(options).items():
            if not self.as_peft and key.endswith("_pattern") and isinstance(values, dict):
                for pattern in values:
                    if not any(by_pattern({pattern: True}, files[name].name, False) for name in names):
                        raise UserError(f"peft.config: {key}: '{pattern}' names none of the layers that are changed")
        return names

    def _options(self) -> Any:
        """peft's own configuration.

        Raises:
            UserError: there is no such method, it has no such option, or something cannot be honoured.
        """
        from peft import PromptLearningConfig
        from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

        known = {str(kind.value): cls for kind, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items() if not issubclass(cls, PromptLearningConfig)}
        method, taken = self.config.type, ("LORA", "IA3", *self.peft_types)
        if method not in known:
            raise UserError(f"peft.type: '{method}' is no method of peft that changes layers (there are: {', '.join(sorted(known))})")
        if method not in taken:
            because = REFUSED.get(method, "nobody has seen whether it computes the same here")
            raise UserError(f"peft.type: {method} is not taken: {because} (there are: {', '.join(taken)})")
        given = {key: value for key, value in self.config.config.items() if value is not None}
        try:
            options = known[method](**given)
        except (TypeError, ValueError) as error:
            raise UserError(f"peft.config: {error}") from None
        self._refuse(options)
        return options

    def _refuse(self, options: Any) -> None:
        """What layers by themselves cannot honour.

        Raises:
            UserError: such an option is set.
        """
        method = self.config.type
        if getattr(options, "modules_to_save", None):
            raise UserError("peft.config: modules_to_save has no place here; use peft=lora with peft.whole")
        if getattr(options, "bias", "none") != "none":
            raise UserError("peft.config: bias has no place here, where biases of the base stay frozen; use peft=lora with peft.bias")
        for key, because in _NOT_ALONE.get(method, {}).items():
            if getattr(options, key) not in (None, False) and not (self.as_peft and key in _OF_TRAINING_ALONE):
                raise UserError(f"peft.config: {key} of {method} has no place here: {because}")
        if method == "VBLORA" and options.topk > options.num_vectors:
            raise UserError(f"peft.config: topk: {options.topk} vectors are to be chosen of {options.num_vectors} (num_vectors)")
        if method == "BOFT" and options.boft_n_butterfly_factor != 1:
            raise UserError(
                "peft.config: boft_n_butterfly_factor: peft computes more factors than one by a kernel that it compiles for CUDA alone, and"
                " takes one without it; leave it at 1"
            )
        if method != "LORA":
            return
        if options.init_lora_weights not in (*_LORA_BEGINNINGS, *(["eva"] if self.as_peft else [])):
            raise UserError(
                f"peft.config: init_lora_weights: {options.init_lora_weights} looks at the base's weights or changes them, which an"
                f" adapter's file does not show; use one of {', '.join(map(str, _LORA_BEGINNINGS))}, or have peft convert such an adapter"
                " (save_pretrained's path_initial_model_for_weight_conversion), and begin from that (peft=lora, peft.adapter)"
            )
        defaults = vars(type(options)())
        for key, value in vars(options).items():
            if key not in _LORA | _WHERE | OF_TRAINING and value not in (defaults[key], None, False) and value != {}:
                raise UserError(f"peft.config: {key} of LORA needs more than the layers that it changes, and has no place here")
        if options.use_dora and options.init_lora_weights is False and not self.as_peft and not self.config.adapter:
            raise UserError(
                "peft.config: init_lora_weights: False begins with a change, whose lengths of rows use_dora does not see; leave it"
            )


def _of_blocks(names: Sequence[str], files: Mapping[str, HFTensor], options: Any) -> list[str]:
    """Of the layers those of the blocks that ``layers_to_transform`` counts, by peft's own reading of names.

    Raises:
        UserError: a number is no block's.
    """
    from peft.tuners.tuners_utils import check_target_module_exists

    wanted = options.layers_to_transform
    found: set[str] = set()
    for number in [wanted] if isinstance(wanted, int) else wanted:
        one = copy.deepcopy(options)
        one.exclude_modules, one.layers_to_transform = None, [number]
        of_block = set()
        for name in names:
            one.target_modules = {files[name].name.rpartition(".")[2]}  # an end: for whole names peft does not look at numbers
            if check_target_module_exists(one, files[name].name):
                of_block.add(name)
        if not of_block:
            raise UserError(f"peft.config: layers_to_transform: {number} is no block with layers that are changed")
        found |= of_block
    return [name for name in names if name in found]


def _from_weights(options: Any) -> bool:
    """Whether a layer's adapter begins from the weight that it changes, or always computes with something that does."""
    method = options.peft_type.value
    return method in FROM_WEIGHTS or (method == "DEFT" and not options.para)


def _of_ia3(options: Any, names: Sequence[str]) -> dict[str, Any]:
    """Which layers are changed, by whole names, among which peft wants to find those whose inputs are."""
    from peft.tuners.ia3.model import IA3Model

    feedforward = [name for name in names if IA3Model._check_target_module_feedforward(options, name)]
    return {"target_modules": sorted(names), "feedforward_modules": sorted(feedforward)}


def _plain(name: str, layer: nn.Module) -> Plain:
    assert isinstance(layer, nn.Linear)
    return Plain(name, layer.in_features, layer.out_features, layer.bias is not None)


def _holding(shared: Mapping[str, nn.Module]) -> nn.Module:
    """A module of these, on the meta device."""
    holder = nn.Module()
    for name, module in shared.items():
        holder.add_module(name, module)
    return holder.to("meta")


def _divides(options: Any, layers: Sequence[Plain]) -> None:
    """Refuse sizes in whose place peft would take others.

    Raises:
        UserError: such a size; what would do.
    """
    for key in ("oft_block_size", "r") if options.peft_type.value == "OFT" else ():
        for of in layers:
            if (size := getattr(options, key)) and of.inputs % size:
                raise UserError(
                    f"peft.config: {key}: {size} does not divide the {of.inputs} inputs of {of.name}; name others, or another size"
                )


def _shows(options: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """What an adapter's tensors do not show, with peft's defaults: all but where they are, how they began and what is dropped."""
    plain = type(options)()
    defaults = {of.name: getattr(plain, of.name) for of in dataclasses.fields(plain)}
    apart = {key for key in config if key in _WHERE or "init" in key or "dropout" in key or key in OF_TRAINING}
    return {key: defaults.get(key) for key in config if key not in apart} | {"peft_type": ""}
