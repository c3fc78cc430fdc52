"""Layers of the peft library, one made at a time, and how they compute inside of a model's own layers."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fw.api import UserError, adapters_are_off
from fw_plugins.peft.changed import become

INSIDE = "peft"
"""Under which a layer has peft's."""
ADAPTER = "default"
"""What peft calls the one adapter there is."""


SHARED = "base_model."
"""Before names of what all layers share."""
_LAYERS = f"{SHARED}model."
"""Before names of what is a layer's own."""


@dataclass(frozen=True)
class Plain:
    """A linear layer that peft is to change.

    Attributes:
        name: in files, by which a configuration's patterns know it.
        inputs, outputs: its features.
        bias: whether it has one.
    """

    name: str
    inputs: int
    outputs: int
    bias: bool


@dataclass(frozen=True)
class Made:
    """What peft makes of linear layers, which are there no more.

    Attributes:
        layers: peft's, by the names that the linear ones have in files; what all share is in none of them.
        shared: modules that all layers use, by name.
        in_files: what files call each parameter, by name: of a layer's after the layer's own and a dot (:meth:`own`), of one that is shared
            :data:`SHARED` and its path.
        repeated: what files hold besides, by what they call it, and what they call that which it repeats.
        fixed: names of buffers, which no file holds, likewise.
        besides: of parameters that no file holds, likewise.
    """

    layers: Mapping[str, nn.Module]
    shared: Mapping[str, nn.Module]
    in_files: Mapping[str, str]
    repeated: Mapping[str, str]
    fixed: Sequence[str]
    besides: Sequence[str] = ()

    def own(self, layer: str, names: Iterable[str]) -> dict[str, str]:
        """Of these names those of a layer's, by its path in the layer."""
        prefix = f"{_LAYERS}{layer}."
        return {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}

    def of_all(self, names: Iterable[str]) -> dict[str, str]:
        """Of these names those of what is shared, by path."""
        return {name.removeprefix(SHARED): name for name in names if not name.startswith(_LAYERS)}

    def tensor(self, name: str) -> Tensor:
        """Of that name."""
        if not name.startswith(_LAYERS):
            first, _, rest = name.removeprefix(SHARED).partition(".")
            return _tensor(self.shared[first], rest)
        layer = next(layer for layer in self.layers if name.startswith(f"{_LAYERS}{layer}."))
        return _tensor(self.layers[layer], name.removeprefix(f"{_LAYERS}{layer}."))


@dataclass(frozen=True)
class OfWeight:
    """Of the base's weight of that name, whatever ``make`` computes of it and the run's seed."""

    weight: str
    make: Callable[[Tensor, int], Tensor]

    def __call__(self, weight_OI: Tensor, seed: int) -> Tensor:
        """Whole."""
        return self.make(weight_OI, seed)


@dataclass(frozen=True)
class OfPeft:
    """Layers to make as peft makes them for linear ones: one, or all of a model where they share tensors.

    Attributes:
        options: peft's configuration.
        layers: that it changes.
    """

    options: Any
    layers: Sequence[Plain]
    _drawn: dict[tuple[int, str], Tensor] = field(default_factory=dict, compare=False)

    def made(self, device: str | torch.device, weight: Tensor | None = None, computed: bool = False) -> Made:
        """The layers.

        Args:
            weight: of the one layer that they stand around. Without it they are no numbers, so that whatever is made from one shows.
            computed: what no file holds is kept as a parameter, too, since a layer may compute it from its weight.

        Raises:
            UserError: peft refuses, or files would not hold all that trains.
        """
        from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
        from peft.utils.save_and_load import get_peft_model_state_dict

        options = copy.deepcopy(self.options)
        options.target_modules, options.exclude_modules = {layer.name for layer in self.layers}, None
        for key, value in (("layers_to_transform", None), ("layers_pattern", None), ("fan_in_fan_out", False)):
            if hasattr(options, key):
                setattr(options, key, value)
        method, whole = f"peft.type: {options.peft_type.value}", _Whole()
        with torch.device(device), _no_kernels_compiled(options.peft_type.value):
            net = _net_of(self.layers, weight)
            try:
                whole.base_model = PEFT_TYPE_TO_TUNER_MAPPING[options.peft_type](net, options, ADAPTER)
            except (ValueError, TypeError, NotImplementedError, AttributeError) as error:
                of = f"{self.layers[0].name}: " if len(self.layers) == 1 else ""
                raise UserError(f"{method}: {of}{error}") from None
            except ArithmeticError as error:
                raise UserError(f"{method}: peft cannot compute with these options ({error}); look for a zero in peft.config") from None
        whole.peft_config = {ADAPTER: options}
        layers = {layer.name: net.get_submodule(layer.name) for layer in self.layers}
        shared = {name: module for name, module in whole.base_model.named_children() if name != "model"}
        for made in layers.values():
            _fixed_as_buffers(made)
        state = {name: tensor for name, tensor in whole.state_dict(keep_vars=True).items() if ".base_layer." not in name}
        found = get_peft_model_state_dict(whole, state, ADAPTER, save_embedding_layers=False)
        for made in layers.values():
            for name in [name for name, module in made._modules.items() if any(module is each for each in shared.values())]:
                made.__dict__[name] = made._modules.pop(name)  # no submodule: what is shared has its names once
        names = {id(tensor): name for name, tensor in (*whole.named_parameters(), *whole.named_buffers())}
        in_files: dict[str, str] = {}
        repeated: dict[str, str] = {}
        for called in sorted(found, key=lambda called: called.startswith(_LAYERS)):
            here = names.get(id(found[called]))
            if here is None:
                raise UserError(f"{method} keeps in its files what it computes when they are written ({called}), which has no place here")
            if in_files.setdefault(here, called) != called:
                repeated[called] = in_files[here]
        trained = {name for name, p in whole.named_parameters() if ".base_layer." not in name}
        if beside := trained - in_files.keys():
            raise UserError(f"{method} adds {sorted(beside)[0]}, which its files do not hold, and has no place here")
        _kept_as_parameters(whole, in_files.keys() - trained)
        fixed = [name for name, _ in whole.named_buffers() if ".base_layer." not in name]
        fixed, besides = ([], fixed) if computed else (fixed, [])
        _kept_as_parameters(whole, besides)
        return Made(layers, shared, in_files, repeated, fixed, besides)

    def drawn(self, inner: str, seed: int, name: str) -> Tensor:
        """How peft begins a parameter.

        Args:
            inner: its name in :class:`Made`.
            seed: of the run.
            name: in the model.

        Raises:
            UserError: by a computation from the weights that it changes.
        """
        values = self._value(inner, seed, name.rpartition(INSIDE)[0])
        if values.is_floating_point() and values.isnan().any():
            method, what = self.options.peft_type.value, inner.removeprefix(_LAYERS).removesuffix(f".{ADAPTER}").rpartition(".")[2]
            raise UserError(
                f"peft.config: {method} with these options begins {what} from the weights that it changes, which it"
                " does not see here; choose another way to begin, or begin from an adapter that peft has made (peft.adapter)"
            )
        return values

    def computed(self, inner: str, name: str, weight_OI: Tensor, seed: int) -> Tensor:
        """How peft begins a parameter of the layer with that weight, or what it always computes it to be; whole, on its device.

        Args:
            inner: its name in :class:`Made`.
            name: in the model.
        """
        whole = weight_OI.full_tensor() if isinstance(weight_OI, DTensor) else weight_OI
        return self._value(inner, seed, name.rpartition(INSIDE)[0], whole)

    def fixed(self, inner: str) -> Tensor:
        """What peft's layers keep of that name without training it."""
        return self._value(inner, 0, "")

    def _value(self, inner: str, seed: int, of: str, weight: Tensor | None = None) -> Tensor:
        """Layers that share are drawn at once, and what is computed from a weight too; each value is given away once."""
        together = len(self.layers) > 1
        if (value := self._drawn.pop((seed, inner), None)) is not None:
            return value
        digest = hashlib.sha256(f"{seed}/{'' if together else of}".encode()).digest()
        gpus = [] if weight is None or weight.device.type == "cpu" else [weight.device]
        with torch.random.fork_rng(devices=gpus):
            for generator in (torch.default_generator, *(torch.cuda.default_generators[gpu.index or 0] for gpu in gpus)):
                generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            made = self.made("cpu" if weight is None else weight.device, weight, computed=weight is not None)
        if not together and weight is None:
            return made.tensor(inner).detach()
        self._drawn.clear()
        self._drawn.update({(seed, each): made.tensor(each).detach() for each in (*made.in_files, *made.fixed, *made.besides)})
        return self._drawn.pop((seed, inner))


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


def _linear(inputs: int, outputs: int, bias: bool, weight: Tensor | None = None) -> nn.Linear:
    """Whose parameters, but for a weight that is given, are of one number each, which takes no memory."""
    layer = nn.Linear(1, 1, bias)
    layer.in_features, layer.out_features = inputs, outputs
    none = torch.full((1,), torch.nan)
    layer.weight = nn.Parameter(none.expand(outputs, inputs) if weight is None else weight, requires_grad=False)
    if bias:
        layer.bias = nn.Parameter(none.expand(outputs), requires_grad=False)
    return layer


def _net_of(layers: Iterable[Plain], weight: Tensor | None = None) -> nn.Module:
    """Modules inside of modules, down to the layers."""
    net = nn.Module()
    for layer in layers:
        *outer, last = layer.name.split(".")
        inside = net
        for part in outer:
            if part not in inside._modules:
                inside.add_module(part, nn.Module())
            inside = inside.get_submodule(part)
        inside.add_module(last, _linear(layer.inputs, layer.outputs, layer.bias, weight))
    return net


def _tensor(module: nn.Module, path: str) -> Tensor:
    *inside, name = path.split(".")
    found: Tensor = getattr(module.get_submodule(".".join(inside)), name)
    return found


class _Whole(nn.Module):
    """As peft's own model has what it changes."""

    base_model: nn.Module
    peft_config: dict[str, Any]


class _Kept(nn.Module):
    """A dictionary of parameters, as peft reads one of buffers."""

    def __getitem__(self, key: str) -> Tensor:
        found = self._parameters[key]
        assert found is not None
        return found

    def __setitem__(self, key: str, value: Tensor) -> None:
        """By peft, for what it has brought to its device."""
        if value is not self[key]:
            raise RuntimeError(f"{key} is kept as a parameter, which nothing may take the place of")

    def __contains__(self, key: object) -> bool:
        return key in self._parameters

    def __len__(self) -> int:
        return len(self._parameters)

    def keys(self) -> Iterable[str]:
        """Of adapters: one."""
        return self._parameters.keys()


@contextmanager
def _no_kernels_compiled(method: str) -> Iterator[None]:
    """BOFT by operators of torch's, on any machine: peft would compile a kernel with the machine's CUDA, and make other layers by it."""
    if method != "BOFT":
        yield
        return
    from peft.tuners.boft import layer as module

    layer: Any = module
    there, layer._FBD_CUDA = layer._FBD_CUDA, False
    try:
        yield
    finally:
        layer._FBD_CUDA = there


def _kept_as_parameters(whole: nn.Module, names: Iterable[str]) -> None:
    """Buffers become parameters that do not train: those that files hold are kept and read as what trains is."""
    from peft.tuners._buffer_dict import BufferDict

    kept: Any = _Kept
    for name in names:
        path, _, last = name.rpartition(".")
        holder = whole.get_submodule(path)
        value = holder._buffers.pop(last)
        assert value is not None
        holder.register_parameter(last, nn.Parameter(value, requires_grad=False))
        if isinstance(holder, BufferDict):
            holder.__class__ = kept


def _fixed_as_buffers(made: nn.Module) -> None:
    """Tensors that a layer keeps in plain dictionaries (FourierFT, WaveFT) go where the model goes."""
    from peft.tuners._buffer_dict import BufferDict

    for name, kept in list(made.__dict__.items()):
        if isinstance(kept, dict) and isinstance(kept.get(ADAPTER), Tensor):
            setattr(made, name, BufferDict({ADAPTER: kept[ADAPTER]}, persistent=False))
