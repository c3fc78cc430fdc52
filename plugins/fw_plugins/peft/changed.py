"""What plugins that change linear layers share: which layers, what is frozen, and how an adapter's file calls what is added."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from fw.api import ADAPTER_CONFIG, Adapters, CausalLM, HFTensor, Init, PeftPlugin, UserError, find, given, read_adapter_config
from fw_plugins.peft.targets import ALL_LINEAR, chosen, names_in_files, shortest

PREFIX = "base_model.model."
"""Of every name in an adapter's file."""

OF_TRAINING = {
    *("task_type", "inference_mode", "base_model_name_or_path", "revision", "auto_mapping", "peft_version"),
    *("megatron_config", "megatron_core", "runtime_config", "layers_pattern"),
}
"""Of ``adapter_config.json``: what says how an adapter came about, or is said by the model."""


class Added(NamedTuple):
    """A parameter that a layer gets.

    Attributes:
        name: in the layer.
        init: how it begins.
        stored: what files call it there.
        split: dimension that tensor parallelism cuts it along, where it cuts the layer's rows, or its columns.
        decays: whether weight decay may have it.
    """

    name: str
    init: Init
    stored: str
    split: tuple[int | None, int | None] = (None, None)
    decays: bool = True


class ChangedLayers(PeftPlugin):
    """Linear layers get parameters, and become layers that compute with them. Options: ``targets``, ``exclude`` and ``adapter``."""

    must_agree: ClassVar[Mapping[str, Any]] = {}
    """Fields of ``adapter_config.json`` that the shapes of an adapter's tensors do not show, and what it means that nothing is said."""
    as_peft = False
    """Whether the options are those of an adapter that is read, in which peft lets pass what names nothing."""
    not_divided_because: ClassVar[str] = ""
    """Why tensor parallelism cannot divide the layers, as a clause; empty where it can."""

    @abstractmethod
    def change(self, module: nn.Linear, name: str) -> Iterator[Added]:
        """Change a layer, in place; what it gets. ``name`` is that of files."""

    @abstractmethod
    def described(self, names: Sequence[str], others: Sequence[str], transposed: bool) -> dict[str, Any]:
        """What ``adapter_config.json`` says besides its task.

        Args:
            names: of layers that are changed, in files; ``others``: of all.
            transposed: whether files hold weights of these transposed.
        """

    def apply(self, model: CausalLM) -> Adapters:
        """Freeze all, and change the layers that the options name."""
        options: Any = self.config
        files = names_in_files(model)
        names = chosen(model, files, options.targets, options.exclude, self.as_peft)
        plan = model.tensor_plan()
        model.requires_grad_(False)
        added: dict[str, Init] = {}
        tensors: dict[str, HFTensor] = {}
        split: dict[str, int] = {}
        undecayed: set[str] = set()
        for name in names:
            module, in_file = model.get_submodule(name), files[name].name
            if not isinstance(module, nn.Linear):
                raise UserError(f"peft.targets: {in_file} is no linear layer, which is all that is changed")
            rows = None if plan is None else cut_along(name, plan.split)
            for each in self.change(module, in_file):
                added[f"{name}.{each.name}"] = each.init
                tensors[f"{name}.{each.name}"] = HFTensor(f"{PREFIX}{in_file}.{each.stored}")
                if not each.decays:
                    undecayed.add(f"{name}.{each.name}")
                if rows is not None and (dim := each.split[rows]) is not None:
                    split[f"{name}.{each.name}"] = dim
        in_files = [files[name].name for name in names]
        described = self.described(in_files, [of.name for of in files.values()], any(files[name].transposed for name in names))
        config = {"task_type": "CAUSAL_LM", "inference_mode": True, **described}
        begun = begun_from(options.adapter, config, self.must_agree)
        return Adapters(added, tensors, config, split, begun, self.not_divided_because, undecayed=frozenset(undecayed))


def target_modules(names: Sequence[str], others: Sequence[str]) -> list[str]:
    """As ``adapter_config.json`` lists them."""
    return shortest(names, others)


def patterns(given: str | Sequence[str] | None) -> list[str]:
    """Of peft's, which takes a single one for a regular expression of a whole name."""
    if isinstance(given, str):
        return [given if given == ALL_LINEAR else f"({given})"]
    return list(given or [])


def begun_from(adapter: str, own: Mapping[str, Any], must_agree: Mapping[str, Any]) -> Path | None:
    """The directory to begin from; what its tensors do not show must be configured alike.

    Raises:
        UserError: there is none, or it was trained otherwise.
    """
    if not adapter:
        return None
    try:
        directory = find(adapter, ADAPTER_CONFIG)
        theirs = read_adapter_config(directory)
    except UserError as error:
        raise UserError(f"peft.adapter: {error}") from None
    for key, unset in must_agree.items():
        if _said(theirs.get(key), unset) != _said(own[key], unset):
            raise UserError(f"peft.adapter: {directory} was trained with {key}={theirs.get(key)}, the config means {own[key]}")
    return directory


def _said(value: Any, unset: Any) -> Any:
    """What a field of a configuration means; names are in any order."""
    value = unset if value is None else value
    return sorted(value) if isinstance(value, list | tuple | set) and all(isinstance(each, str) for each in value) else value


def refuse_unknown(raw: Mapping[str, Any], read: set[str]) -> None:
    """What changes the result must be read.

    Raises:
        UserError: a field that is set and nobody reads, by name.
    """
    unknown = {key: value for key, value in raw.items() if key not in read | OF_TRAINING and value not in (None, False, [], {})}
    if unknown:
        raise UserError(f"{', '.join(f'{key}={value!r}' for key, value in unknown.items())} cannot be honoured here")


def become(module: nn.Module, kind: type[nn.Module], parameters: Mapping[str, tuple[int, ...]]) -> None:
    """Make a module one of a class that is both what it was and ``kind``; what is added has no values yet.

    The module stays the object it was, and its weight keeps its name, so that whatever computes with it (plain, quantized, divided between
    ranks) goes on doing so.
    """
    module.__class__ = _both(kind, type(module))
    for name, shape in parameters.items():
        module.register_parameter(name, nn.Parameter(torch.empty(shape)))


def unchanged(module: nn.Module, kind: type[nn.Module], added: Sequence[str]) -> nn.Module | None:
    """What a module was before :func:`become` made it one of ``kind``, too, on the same tensors; None where it has become more.

    Args:
        added: names of the parameters that came with it.
    """
    cls = type(module)
    was = kind.__bases__[0] if cls is kind else cls.__bases__[1] if cls.__bases__[0] is kind else None
    if was is None:
        return None
    found: nn.Module = object.__new__(was)
    found.__dict__ = {**module.__dict__, "_parameters": {name: p for name, p in module._parameters.items() if name not in added}}
    return found


_classes: dict[tuple[type, type], Any] = {}


def _both(kind: type[nn.Module], cls: type[nn.Module]) -> Any:
    """A class that is both; one for all modules, which torch.compile tells apart by their class."""
    if cls in kind.__mro__:
        return kind
    return _classes.setdefault((kind, cls), type(f"{kind.__name__}({cls.__name__})", (kind, cls), {}))


def cut_along(name: str, plan: Mapping[str, int]) -> int | None:
    """The dimension along which ranks divide a layer's weight."""
    return given(plan, f"{name}.weight")
