"""Methods of the peft library, by its own code.

peft puts a layer of its own in the place of each linear layer that it changes, and the layer there was inside. Here it stays where it was,
under its name, and peft's is inside: computing what the layer did before goes through a second object with the same parameters.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fw.api import Adapters, CausalLM, HFTensor, Init, PeftPlugin, UserError, adapters_are_off
from fw_plugins.peft.changed import OF_TRAINING, PREFIX, become, begun_from, patterns
from fw_plugins.peft.targets import ALL_LINEAR, chosen, names_in_files

_INSIDE = "peft"
_ADAPTER = "default"


@dataclass
class HFPeftConfig:
    """A method of the peft library, with its own options."""

    type: str = "LOHA"
    """`peft_type` of a method that changes linear layers and keeps nothing beside what trains: LOHA, LOKR, HRA, MISS, C3A, ROAD, GRALORA,
    or LORA with options that `lora` has not."""
    config: dict[str, Any] = field(default_factory=dict)
    """Options of its configuration class in peft (`LoHaConfig`, …), among them `target_modules`, `all-linear` where it says none, and
    `exclude_modules`."""
    adapter: str = ""
    """Directory of an adapter to begin from, of fw's or peft's; empty for a new one. Its configuration must be the one given here."""


class HFPeft(PeftPlugin):
    """A method of the peft library that changes linear layers, by its own code and configuration."""

    api = 1
    Config = HFPeftConfig
    config: HFPeftConfig
    packages = {"peft": "peft>=0.21"}  # noqa: RUF012
    peft_types = ("LOHA", "LOKR", "HRA", "MISS", "C3A", "ROAD", "GRALORA")

    @classmethod
    def from_peft(cls, raw: Mapping[str, Any]) -> PeftPlugin:
        """As the method's own class reads it."""
        return cls(
            HFPeftConfig(type=str(raw.get("peft_type")), config={k: v for k, v in raw.items() if k not in OF_TRAINING | {"peft_type"}})
        )

    def apply(self, model: CausalLM) -> Adapters:
        """Inject, then put every layer back in its place."""
        import peft

        options = self._options()
        files = names_in_files(model)
        names = chosen(model, files, patterns(options.target_modules or ALL_LINEAR), patterns(getattr(options, "exclude_modules", None)))
        if strangers := [files[name].name for name in names if not isinstance(model.get_submodule(name), nn.Linear)]:
            raise UserError(f"peft.config: {strangers[0]} is no linear layer, which is all that is changed")
        model.requires_grad_(False)
        before = {name: model.get_submodule(name) for name in names}
        injected = copy.copy(options)
        injected.target_modules, injected.exclude_modules = set(names), None
        buffers = {name for name, _ in model.named_buffers()}
        kept_as = {name: weight.dtype for name in names if (weight := model.quantized.get(f"{name}.weight")) is not None}
        for name, dtype in kept_as.items():
            _put(model, name, _Dense(before[name], dtype))
        try:
            peft.inject_adapter_in_model(injected, model, _ADAPTER)
        except (ValueError, TypeError, NotImplementedError, AttributeError) as error:
            raise UserError(f"peft.type: {self.config.type}: {error}") from None
        if more := {name for name, _ in model.named_buffers()} - buffers:
            raise UserError(f"peft.type: {self.config.type} keeps what does not train ({sorted(more)[0]}), which has no place here")
        added: dict[str, Init] = {}
        tensors: dict[str, HFTensor] = {}
        for name, layer in before.items():
            changed = model.get_submodule(name)
            _put(model, name, layer)
            _put_inside(layer, changed, kept_as.get(name))
            assert isinstance(layer, nn.Linear)
            draw = partial(_drawn, options, layer.in_features, layer.out_features, layer.bias is not None)
            for inner, parameter in changed.named_parameters():
                if not parameter.requires_grad:
                    raise UserError(f"peft.type: {self.config.type} adds {inner}, which does not train, and has no place here")
                added[f"{name}.{_INSIDE}.{inner}"] = Init(values=partial(draw, inner))
                tensors[f"{name}.{_INSIDE}.{inner}"] = HFTensor(f"{PREFIX}{files[name].name}.{_in_files(inner)}")
        outside = [name for name, parameter in model.named_parameters() if parameter.requires_grad and name not in added]
        if outside:
            raise UserError(f"peft.type: {self.config.type} adds {outside[0]}, which is of no layer, and has no place here")
        config = {k: sorted(v) if isinstance(v, set) else v for k, v in options.to_dict().items() if k not in OF_TRAINING}
        config |= {
            "task_type": "CAUSAL_LM",
            "inference_mode": True,
            "target_modules": sorted(patterns(options.target_modules or ALL_LINEAR)),
        }
        begun = begun_from(self.config.adapter, config, {"peft_type": ""})
        return Adapters(added, tensors, config, {}, begun, "the peft library computes whole layers")

    def _options(self) -> Any:
        """peft's own configuration.

        Raises:
            UserError: there is no such method, it has no such option, or it changes no layers.
        """
        from peft import PromptLearningConfig
        from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

        known = {str(kind.value): cls for kind, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items() if not issubclass(cls, PromptLearningConfig)}
        if self.config.type not in known:
            raise UserError(
                f"peft.type: '{self.config.type}' is no method of peft that changes layers (there are: {', '.join(sorted(known))})"
            )
        given = {key: value for key, value in self.config.config.items() if value is not None}
        try:
            return known[self.config.type](**given)
        except (TypeError, ValueError) as error:
            raise UserError(f"peft.config: {error}") from None


class PeftLinear(nn.Linear):
    """A linear layer as a method of peft changes it."""

    def forward(self, x_I: Tensor) -> Tensor:
        """``[…, I]`` → ``[…, O]``."""
        if adapters_are_off():
            return super().forward(x_I)
        out_O: Tensor = self._modules[_INSIDE](x_I)  # type: ignore[misc]
        return out_O


def _put(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, layer)


class _Dense(nn.Linear):
    """A layer of codes as peft's methods may look at it: its weight has the shape and the numbers that the codes stand for."""

    def __init__(self, coded: Any, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = coded.in_features, coded.out_features
        self._coded, self._dtype = (coded,), dtype  # no submodule, as below

    # Made anew each time, and kept by nobody.
    weight = property(lambda self: self._coded[0].dense_weight(self._dtype))
    bias = property(lambda self: self._coded[0].bias)

    def forward(self, x_I: Tensor) -> Tensor:
        """From the codes."""
        out_O: Tensor = self._coded[0](x_I)
        return out_O


def _put_inside(layer: nn.Module, changed: nn.Module, quantized: torch.dtype | None) -> None:
    """peft's layer into the one that it stands for.

    Args:
        quantized: dtype of the weight where the layer keeps codes of it.
    """
    plain = copy.copy(layer)  # the same parameters, and what is done to them: it has the dictionary that they are in
    become(layer, PeftLinear, {})
    del changed._modules["base_layer"]
    # No submodule: its parameters have their names already.
    changed.__dict__["base_layer"] = plain if quantized is None else _Dense(plain, quantized)
    layer.add_module(_INSIDE, changed)


def _in_files(inner: str) -> str:
    """Without the name that an adapter has inside peft."""
    return ".".join(part for part in inner.split(".") if part != _ADAPTER)


def _drawn(options: Any, inputs: int, outputs: int, bias: bool, inner: str, seed: int, name: str) -> Tensor:
    """As peft begins a parameter of such a layer."""
    import peft

    digest = hashlib.sha256(f"{seed}/{name.rpartition(_INSIDE)[0]}".encode()).digest()
    alone = copy.copy(options)
    alone.target_modules, alone.exclude_modules = {"layer"}, None
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)  # the host's alone
        net = nn.ModuleDict({"layer": nn.utils.skip_init(nn.Linear, inputs, outputs, bias=bias)})
        peft.inject_adapter_in_model(alone, net, _ADAPTER)
    return net["layer"].get_parameter(inner).detach()
