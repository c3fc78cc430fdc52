"""Weights that stay in the files of a model directory, mapped: they take none of the process's own memory, and what the system keeps of
them in its cache it gives up when others need it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase

from torch import Tensor, nn

from fw.checkpointing.tensor_files import Filling
from fw.config import format_size
from fw.errors import UserError
from fw.kinds.model import CausalLM, HFTensor
from fw.kinds.offload import OffloadPolicy


def found_in_files(model: CausalLM, filling: Filling) -> dict[str, Tensor]:
    """Views into the mapped files, by the model's own names: of matrices that are there as the model has them."""
    found = {}
    codes = {name for weight in model.quantized.values() for name in weight.kept}
    added = model.adapters.added if model.adapters is not None else {}
    for name, tensor in model.stored().items():
        of = model.hf_tensors(name)
        if tensor.ndim != 2 or name in codes or name in added or len(of) != 1:
            continue
        if of[0] != HFTensor(of[0].name, transposed=of[0].transposed):
            continue
        mapped = filling.files.mapped(filling.names[of[0].name])
        if mapped is not None and mapped.dtype == tensor.dtype:
            found[name] = mapped.t() if of[0].transposed else mapped
    return found


def choose_in_files(model: CausalLM, filling: Filling, policy: OffloadPolicy) -> dict[str, Tensor]:
    """Those that stay, since memory for parameters is short: the embedding first, of which few rows are read, then the last blocks.

    Raises:
        UserError: what cannot stay in files is more than the budget; a pattern that no parameter has.
    """
    every = model.stored()
    movable = found_in_files(model, filling)
    for pattern in policy.modules:
        if not any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for name in every):
            raise UserError(f"offload.modules: no parameter of the model is in '{pattern}' (there is {next(iter(every))}, for one)")
    if policy.modules:
        those = [name for name in movable if any(fnmatchcase(name, p) or fnmatchcase(name, f"{p}.*") for p in policy.modules)]
        movable = {name: movable[name] for name in those}
    if policy.budget is None:
        return movable
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in every.items()}
    room = policy.budget - sum(size for name, size in sizes.items() if name not in movable)
    if room < 0:
        raise UserError(
            f"offload.budget: {format_size(policy.budget)}, and {format_size(policy.budget - room)} of weights cannot stay in the files: of"
            " these stay matrices that the files hold each by itself and in the dtype of the model; raise it"
            + (", or set offload.modules to more" if policy.modules else "")
        )
    for name in _most_read_first(model, movable):
        if sizes[name] <= room:
            room -= sizes[name]
            del movable[name]
    return movable


def _most_read_first(model: CausalLM, names: Iterable[str]) -> list[str]:
    """The head, blocks in their order, and then what is left."""
    name_of = {id(tensor): name for name, tensor in model.named_parameters()}
    heads = [model.own_head] if model.own_head is not None else []
    ranked = dict.fromkeys(name_of[id(tensor)] for part in [*heads, *model.blocks] for tensor in part.parameters())
    wanted = set(names)
    return [name for name in [*ranked, *(name for name in names if name not in ranked)] if name in wanted]


@contextmanager
def left_out(model: CausalLM, staying: Mapping[str, Tensor]) -> Iterator[None]:
    """Meanwhile the model has no such parameters, and afterwards these tensors for them, wherever they are used."""
    parameters = dict(model.named_parameters())
    made = {id(parameters[name]): nn.Parameter(tensor, requires_grad=False) for name, tensor in staying.items()}
    places = [
        (module, name, made[id(parameter)])
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if id(parameter) in made
    ]
    for module, name, _ in places:
        module._parameters[name] = None
    yield
    for module, name, parameter in places:
        module._parameters[name] = parameter
