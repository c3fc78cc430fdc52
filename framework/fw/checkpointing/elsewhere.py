"""Weights of blocks that a GPU has no room for: which these are, and where they lie meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from torch import Tensor

from fw.checkpointing.in_files import choose_in_files, found_in_files, is_in, matching, matrices, none_in_files
from fw.checkpointing.quantized_files import weights_of
from fw.checkpointing.streaming import PLACES, room
from fw.checkpointing.tensor_files import weights_for
from fw.config import format_size
from fw.errors import UserError
from fw.kernels.copies import host_memory
from fw.kinds.model import CausalLM
from fw.kinds.offload import OffloadPolicy
from fw.planned import planned_gpu

_Weights = Mapping[str, Tensor]
HOST_SHARE = 0.8
"""Of the host's free memory, for weights that nobody has bounded."""


@dataclass(frozen=True)
class Elsewhere:
    """Parameters by the model's own names.

    Attributes:
        on_host: that are to lie in host memory, on the meta device.
        in_files: views into mapped files.
    """

    on_host: _Weights = field(default_factory=dict)
    in_files: _Weights = field(default_factory=dict)

    @property
    def host_bytes(self) -> int:
        """Of the host's memory."""
        return _bytes(self.on_host)


def chosen_elsewhere(model: CausalLM, weights: Path, on_gpu: bool, policy: OffloadPolicy | None) -> Elsewhere:
    """Of a model on the meta device the parameters that are not to be in memory where it computes.

    Args:
        weights: the model's directory.
        on_gpu: whether that is a GPU's.

    Raises:
        UserError: as ``policy`` wants it cannot be.
    """
    if policy is None or policy.params == "device":
        return Elsewhere()
    if not on_gpu:
        return Elsewhere(in_files=choose_in_files(model, weights_for(weights_of(weights), model), policy))
    return choose_elsewhere(model, weights, policy)


def check_host(away: Elsewhere, free: int) -> None:
    """Refuse what the host has no memory for.

    Args:
        free: bytes of it.

    Raises:
        UserError: that is less.
    """
    if planned_gpu() is None and away.host_bytes > free:
        raise UserError(
            f"offload.params: {format_size(away.host_bytes)} of weights are to lie in host memory, of which {format_size(free)} are free;"
            " leave them in the files (offload.params=nvme), or keep them in fewer bits (quantization)"
        )


def announced(away: Elsewhere) -> dict[str, Tensor]:
    """All of them."""
    return {**away.on_host, **away.in_files}


def announce(model: CausalLM, away: Elsewhere, on_gpu: bool) -> None:
    """Say of a model on the meta device which parameters these are."""
    model.in_files = away.in_files
    if on_gpu:
        model.elsewhere = announced(away)


def allocate(model: CausalLM) -> None:
    """Memory of the host for those that are to lie there; before the model leaves the meta device."""
    model.elsewhere = {
        name: model.in_files[name] if name in model.in_files else host_memory(tensor.shape, tensor.dtype)
        for name, tensor in model.elsewhere.items()
    }


def choose_elsewhere(model: CausalLM, weights: Path | None, policy: OffloadPolicy) -> Elsewhere:
    """Of a model on the meta device, the frozen matrices and codes of as few blocks as make the rest, and room for those of two blocks, fit
    ``policy.budget``; of all blocks where there is none. They are spread evenly, so that a block is on its way while others compute.

    Args:
        weights: the model's directory; None for one with initial values. Where it has no files, as for a plan, they are taken to hold what
            the model has.

    Raises:
        UserError: nothing can leave, or too little.
    """
    on_host = _of_blocks(model, {name: tensor for name, tensor in model.named_parameters() if _is_large(model, name, tensor)}, policy)
    in_files: list[_Weights] = [{} for _ in on_host]
    host_room = inf if policy.params == "cpu" else policy.host_budget or 0
    if host_room < sum(map(_bytes, on_host)):
        own = dict(model.named_parameters())
        files = {} if weights is None else _found(model, weights)
        found = {name: tensor for name, tensor in files.items() if _is_frozen(model, name, own[name])}
        if not found and not host_room:
            raise none_in_files(model, weights, "offload.params")
        if not host_room or policy.modules == () or _any_is_in(found, policy):
            in_files = _of_blocks(model, found, policy)
    some = [number for number, (these, those) in enumerate(zip(on_host, in_files, strict=True)) if these and (host_room or those)]
    if not some:
        raise UserError(f"offload.modules: nothing of {', '.join(policy.modules)} is a matrix of a block, and only these leave a GPU")
    every = _bytes(model.stored())
    least = inf
    for count in (0, *range(PLACES + 1, len(some) + 1)) if policy.budget is not None else (len(some),):
        chosen, left = Elsewhere({}, {}), host_room
        largest = 0
        for number in _evenly(some, count):
            fits = _bytes(on_host[number]) <= left
            leaving = on_host[number] if fits else in_files[number]
            left -= _bytes(leaving) if fits else 0
            chosen = Elsewhere({**chosen.on_host, **leaving}, chosen.in_files) if fits else _also_in_files(chosen, leaving)
            largest = max(largest, room(leaving.values()))
        taken = every - _bytes(chosen.on_host) - _bytes(chosen.in_files) + min(PLACES, count) * largest
        if policy.budget is None or taken <= policy.budget:
            return chosen
        least = min(least, taken)
    option = "offload.max_memory: device" if policy.automatic else "offload.budget"
    raise UserError(
        f"{option}: {format_size(policy.budget or 0)}, and {format_size(int(least))} are the least that weights take here: what is in"
        " no block, vectors, and room for two blocks on their way; raise it"
        + (", or set offload.modules to more" if policy.modules else "")
    )


def _any_is_in(found: _Weights, policy: OffloadPolicy) -> bool:
    return any(is_in(name, pattern) for name in found for pattern in policy.modules)


def _also_in_files(chosen: Elsewhere, leaving: _Weights) -> Elsewhere:
    return Elsewhere(chosen.on_host, {**chosen.in_files, **leaving})


def _bytes(weights: _Weights) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in weights.values())


def _is_large(model: CausalLM, name: str, tensor: Tensor) -> bool:
    """Vectors are not worth a copy; codes are what matrices have become."""
    return _is_frozen(model, name, tensor) and (tensor.dim() > 1 or any(name in weight.kept for weight in model.quantized.values()))


def _is_frozen(model: CausalLM, name: str, tensor: Tensor) -> bool:
    """Of a model with adapters; all of another, which nobody trains."""
    return model.adapters is None or not (name in model.adapters.added or tensor.requires_grad)


def _of_blocks(model: CausalLM, movable: _Weights, policy: OffloadPolicy) -> list[_Weights]:
    """Of each block those that are its own alone."""
    movable = matching(model, movable, policy)
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    inside = [{names[id(tensor)] for tensor in block.parameters()} for block in model.blocks]
    seen = [name for block in inside for name in block]
    own = {name for name in seen if seen.count(name) == 1} if len(set(seen)) < len(seen) else set(seen)
    return [{name: tensor for name, tensor in movable.items() if name in block & own} for block in inside]


def _found(model: CausalLM, weights: Path) -> _Weights:
    try:
        files = weights_of(weights)
    except UserError:  # a plan needs none
        return {name: tensor for name, (tensor, _) in matrices(model).items()}
    return found_in_files(model, weights_for(files, model))


def _evenly(numbers: Sequence[int], count: int) -> list[int]:
    return [numbers[(2 * at + 1) * len(numbers) // (2 * count)] for at in range(count)]
