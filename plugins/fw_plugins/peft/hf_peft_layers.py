"""Layers of the peft library, one made at a time, and how they compute inside of a model's own layers."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fw.api import UserError, adapters_are_off
from fw_plugins.peft.changed import become

INSIDE = "peft"
"""Under which a layer has peft's."""
ADAPTER = "default"
"""What peft calls the one adapter there is."""


@dataclass(frozen=True)
class OfPeft:
    """A layer to make as peft makes it for a linear one.

    Attributes:
        options: peft's configuration.
        name: in files, by which the configuration's patterns know it.
        inputs, outputs: features of the linear layer.
        bias: whether it has one.
    """

    options: Any
    name: str
    inputs: int
    outputs: int
    bias: bool

    def layer(self, device: str) -> tuple[nn.Module, dict[str, str]]:
        """The layer, and what files call each of its parameters: names there by those in the layer.

        The weight that it stands around is no number, so that whatever is made from it shows.

        Raises:
            UserError: peft refuses, or files would hold more than what trains.
        """
        import peft
        from peft.utils.save_and_load import get_peft_model_state_dict

        options = copy.deepcopy(self.options)
        options.target_modules, options.exclude_modules = {self.name}, None
        for field, value in (("layers_to_transform", None), ("layers_pattern", None), ("fan_in_fan_out", False)):
            if hasattr(options, field):
                setattr(options, field, value)
        method = f"peft.type: {options.peft_type.value}"
        with torch.device(device):
            net = _net_of(self.name, _linear(self.inputs, self.outputs, self.bias))
            try:
                peft.inject_adapter_in_model(options, net, ADAPTER)
            except (ValueError, TypeError, NotImplementedError, AttributeError) as error:
                raise UserError(f"{method}: {self.name}: {error}") from None
            made = net.get_submodule(self.name)
            _fixed_as_buffers(made)
        prefix = f"{self.name}."
        state = {name: tensor for name, tensor in net.state_dict(keep_vars=True).items() if ".base_layer." not in name}
        inner = {id(tensor): name.removeprefix(prefix) for name, tensor in state.items()}
        found = {}
        for name, tensor in get_peft_model_state_dict(net, state, ADAPTER, save_embedding_layers=False).items():
            if not isinstance(tensor, nn.Parameter) or not tensor.requires_grad or id(tensor) not in inner:
                raise UserError(f"{method} keeps what does not train in its files ({name}), which has no place here")
            found[inner[id(tensor)]] = name
        if beside := {name for name, p in made.named_parameters() if not name.startswith("base_layer.")} - found.keys():
            raise UserError(f"{method} adds {sorted(beside)[0]}, which its files do not hold, and has no place here")
        return made, found

    def drawn(self, inner: str, seed: int, name: str) -> Tensor:
        """How peft begins a parameter.

        Args:
            inner: its name in peft's layer.
            seed: of the run.
            name: in the model.

        Raises:
            UserError: by a computation from the weight that it changes.
        """
        digest = hashlib.sha256(f"{seed}/{name.rpartition(INSIDE)[0]}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)  # the host's alone
            values = self.layer("cpu")[0].get_parameter(inner).detach()
        if values.isnan().any():
            method = self.options.peft_type.value
            raise UserError(
                f"peft.config: {method} with these options begins {inner.partition('.')[0]} from the weights that it changes, which it"
                " does not see here; choose another way to begin, or begin from an adapter that peft has made (peft.adapter)"
            )
        return values

    def fixed(self, inner: str) -> Tensor:
        """What peft's layer keeps of that name without training it."""
        return self.layer("cpu")[0].get_buffer(inner)


class PeftLinear(nn.Linear):
    """A linear layer as a method of peft changes it."""

    def forward(self, x_I: Tensor) -> Tensor:
        """``[…, I]`` → ``[…, O]``."""
        if adapters_are_off():
            return super().forward(x_I)
        out_O: Tensor = self._modules[INSIDE](x_I)  # type: ignore[misc]
        return out_O


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


def put_inside(layer: nn.Module, made: nn.Module, quantized: torch.dtype | None) -> None:
    """peft's layer into the one that it stands for.

    Args:
        quantized: dtype of the weight where the layer keeps codes of it.
    """
    plain = copy.copy(layer)  # the same parameters, and what is done to them: it has the dictionary that they are in
    become(layer, PeftLinear, {})
    del made._modules["base_layer"]
    # No submodule: its parameters have their names already.
    made.__dict__["base_layer"] = plain if quantized is None else _Dense(plain, quantized)
    layer.add_module(INSIDE, made)


def _linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    """Whose parameters are of one number each, which takes no memory."""
    layer = nn.Linear(1, 1, bias)
    layer.in_features, layer.out_features = inputs, outputs
    none = torch.full((1,), torch.nan)
    layer.weight = nn.Parameter(none.expand(outputs, inputs), requires_grad=False)
    if bias:
        layer.bias = nn.Parameter(none.expand(outputs), requires_grad=False)
    return layer


def _net_of(name: str, layer: nn.Module) -> nn.Module:
    """Modules inside of modules, down to the layer."""
    *outer, last = name.split(".")
    net = inside = nn.Module()
    for part in outer:
        module = nn.Module()
        inside.add_module(part, module)
        inside = module
    inside.add_module(last, layer)
    return net


def _fixed_as_buffers(made: nn.Module) -> None:
    """Tensors that a layer keeps in plain dictionaries (FourierFT, WaveFT) go where the model goes."""
    from peft.tuners._buffer_dict import BufferDict

    for name, kept in list(made.__dict__.items()):
        if isinstance(kept, dict) and isinstance(kept.get(ADAPTER), Tensor):
            setattr(made, name, BufferDict({ADAPTER: kept[ADAPTER]}, persistent=False))
