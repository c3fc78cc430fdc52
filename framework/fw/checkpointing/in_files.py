"""Weights that stay in the files of a model directory, mapped: they take none of the process's own memory, and what the system keeps of
them in its cache it gives up when others need it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fw.checkpointing.pages import coming
from fw.checkpointing.quantized_files import weights_of
from fw.checkpointing.tensor_files import Filling, weights_for
from fw.config import format_size
from fw.errors import UserError
from fw.kinds.model import CausalLM, HFTensor
from fw.kinds.offload import OffloadPolicy


def found_in_files(model: CausalLM, filling: Filling) -> dict[str, Tensor]:
    """Views into the mapped files, by the model's own names: of matrices that are there as the model has them."""
    found = {}
    for name, (tensor, of) in matrices(model).items():
        mapped = filling.files.mapped(filling.names[of.name])
        if mapped is not None and mapped.dtype == tensor.dtype:
            found[name] = mapped.t() if of.transposed else mapped
    return found


def matrices(model: CausalLM) -> dict[str, tuple[Tensor, HFTensor]]:
    """Of a model, those that files hold each by itself, by the model's own names; neither codes nor adapters."""
    found = {}
    apart = {name for weight in model.quantized.values() for name in weight.kept}
    if model.adapters is not None:
        apart |= model.adapters.added.keys()
    for name, tensor in model.named_parameters():
        if tensor.ndim == 2 and name not in apart:
            of = model.hf_tensors(name)
            if len(of) == 1 and of[0] == HFTensor(of[0].name, transposed=of[0].transposed):
                found[name] = tensor.detach(), of[0]
    return found


def choose_in_files(model: CausalLM, filling: Filling, policy: OffloadPolicy) -> dict[str, Tensor]:
    """Those that stay, since memory for parameters is short: the embedding first, of which few rows are read, then the last blocks.

    Raises:
        UserError: there is none that can; what cannot stay in files is more than the budget; a pattern that no parameter has.
    """
    return _chosen(model, found_in_files(model, filling), policy, filling.files.directory, "offload.params")


def frozen_in_files(model: CausalLM, weights: Path, policy: OffloadPolicy, option: str = "offload.params") -> dict[str, Tensor]:
    """Of a model that trains in part, on the meta device: those that stay in the files of ``weights``, as :func:`choose_in_files` does.

    A plan needs no files: where there are none, they are taken to hold what the model has.

    Args:
        option: that asks for it, for who is told what is wrong.

    Raises:
        UserError: likewise.
    """
    try:
        found = found_in_files(model, weights_for(weights_of(weights), model))
    except UserError:
        found = {name: tensor for name, (tensor, _) in matrices(model).items()}
    parameters = dict(model.named_parameters())
    frozen = {name: tensor for name, tensor in found.items() if not parameters[name].requires_grad}
    return _chosen(model, frozen, policy, weights, option)


def _chosen(model: CausalLM, movable: dict[str, Tensor], policy: OffloadPolicy, directory: object, option: str) -> dict[str, Tensor]:
    every = model.stored()
    if not movable:
        matching(model, movable, policy)
        raise none_in_files(model, directory, option)
    movable = matching(model, movable, policy)
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


def none_in_files(model: CausalLM, directory: object, option: str) -> UserError:
    """That nothing can stay there, as ``option`` asks."""
    dtypes = " and ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor, _ in matrices(model).values()}))
    return UserError(
        f"{option}: nvme leaves matrices in files that hold each by itself and as the model computes with it"
        f"{f' (here in {dtypes})' if dtypes else ''}, and {directory} holds none so; leave it out, or compute in the dtype of the files"
    )


def matching(model: CausalLM, movable: Mapping[str, Tensor], policy: OffloadPolicy) -> dict[str, Tensor]:
    """Those that ``policy.modules`` allows to leave.

    Raises:
        UserError: a pattern that no parameter has; none is left of some.
    """
    every = model.stored()
    for pattern in policy.modules:
        if not any(is_in(name, pattern) for name in every):
            raise UserError(f"offload.modules: no parameter of the model is in '{pattern}' (there is {next(iter(every))}, for one)")
    those = {name: tensor for name, tensor in movable.items() if not policy.modules or any(is_in(name, p) for p in policy.modules)}
    if movable and not those:
        raise UserError(f"offload.modules: nothing of {', '.join(policy.modules)} can leave memory ({next(iter(movable))} can, for one)")
    return those


def is_in(name: str, pattern: str) -> bool:
    """Whether a parameter, or something that has it, is called so."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _most_read_first(model: CausalLM, names: Iterable[str]) -> list[str]:
    """The head, blocks in their order, and then what is left."""
    name_of = {id(tensor): name for name, tensor in model.named_parameters()}
    heads = [model.own_head] if model.own_head is not None else []
    ranked = dict.fromkeys(name_of[id(tensor)] for part in [*heads, *model.blocks] for tensor in part.parameters())
    wanted = set(names)
    return [name for name in [*ranked, *(name for name in names if name not in ranked)] if name in wanted]


def bring_ahead(model: CausalLM) -> None:
    """While a block computes, what the next one has in files is read, where it is not in memory: in a backward, the one before it. Of a
    model that does not train the last block is followed by the first. To a GPU
    :mod:`fw.checkpointing.streaming` brings it."""
    if model.elsewhere:
        return
    mapped = {tensor.data_ptr() for tensor in model.in_files.values()}
    if not mapped:
        return
    of_block = [[tensor for tensor in chain(block.parameters(), block.buffers()) if tensor.data_ptr() in mapped] for block in model.blocks]
    if any(parameter.requires_grad for parameter in model.parameters()):
        first_again, last_again = [], []  # a backward begins where the forward has ended, and the other way round
    else:
        first_again, last_again = of_block[0], of_block[-1]
    around = zip(model.blocks, [last_again, *of_block[:-1]], [*of_block[1:], first_again], strict=True)
    for block, before, following in around:
        block.register_forward_pre_hook(_bring(following))
        block.register_forward_hook(_bring_in_backward(before))


def _bring(tensors: Sequence[Tensor]) -> Callable[..., None]:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def hook(*_: Any) -> None:
        for tensor in tensors:
            coming(tensor)

    found: Callable[..., None] = hook
    return found


def _bring_in_backward(tensors: Sequence[Tensor]) -> Callable[..., None]:
    bring = _bring(tensors)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def hook(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(bring)

    found: Callable[..., None] = hook
    return found
