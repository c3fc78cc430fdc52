"""Which part of a tensor this rank keeps, and initial values that do not depend on it."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from fw.kinds.checkpoint import Kept, Piece
from fw.kinds.model import CausalLM, Give, Init

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Slices = tuple[slice, ...]

_CHUNK = 1 << 16
"""Elements drawn from one generator. Part of what a seed means: changing it changes every initial weight."""


@dataclass(frozen=True)
class Cut(Kept):
    """A tensor of which there is only a part here.

    Attributes:
        local: the part.
        where: it stands in the whole.
    """

    local: Tensor
    where: Slices
    shape: torch.Size
    dtype: torch.dtype

    def piece(self) -> Piece:
        """The part."""
        return Piece(self.where, lambda: self.local)


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor: what these are takes a second to import, and where nobody has done so there is none."""
    of_torch = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return of_torch is not None and isinstance(tensor, of_torch)


def local_part(tensor: Tensor | Cut) -> tuple[Tensor, Slices]:
    """The bytes this rank keeps of ``tensor`` and where they stand in the whole; writing to them writes to ``tensor``."""
    if isinstance(tensor, Cut):
        return tensor.local, tensor.where
    if not is_dtensor(tensor):
        return tensor, tuple(slice(0, size) for size in tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))


@torch.no_grad()
def initialise(tensor: Tensor, name: str, init: Init, seed: int) -> None:
    """Fill the rank's part of a parameter, with values that are the same for any number of ranks and any device.

    The flattened whole is cut into chunks, and each chunk has a generator of its own, seeded by seed, name and position. A rank draws
    the chunks that its rows touch and keeps what it needs of them, so it holds one chunk at a time and never the whole.
    """
    local, where = local_part(tensor)
    if local.numel() == 0:
        return
    if init.values is not None:
        local.copy_(init.values(seed, name)[where])
        return
    if not (init.std or init.bound):
        local.fill_(init.value)
        return
    row_size = math.prod(tensor.shape[1:])
    first, last = where[0].start * row_size, where[0].stop * row_size
    columns = where[1:]
    whole_rows = all(s.start == 0 and s.stop == size for s, size in zip(columns, tensor.shape[1:], strict=True))
    if whole_rows and local.is_contiguous():
        flat = local.view(-1)
        for start, values in _chunks(first, last, name, seed, init):
            flat[start - first : start - first + values.numel()] = values
        return
    # Cut along other dimensions too: draw a few rows at a time, then keep the columns.
    for row in range(where[0].start, where[0].stop):
        values = torch.cat([v for _, v in _chunks(row * row_size, (row + 1) * row_size, name, seed, init)])
        local[row - where[0].start] = values.view(tensor.shape[1:])[columns]


@torch.no_grad()
def fill_from_base(model: CausalLM, tensors: Mapping[str, Tensor], seed: int = 0, all_of_them: bool = False) -> None:
    """Of these tensors those that adapters take from weights of the base, which have their values; on all ranks alike.

    Args:
        all_of_them: at the beginning; else what no file holds.
    """
    if model.adapters is None or not model.adapters.from_base:
        return
    base = model.stored()
    for name, of in model.adapters.from_base.items():
        if name in tensors and (all_of_them or name not in model.adapters.tensors):
            values = of(base[of.weight].detach(), seed)
            if is_dtensor(values):
                tensors[name].detach().copy_(values)
            else:
                local, where = local_part(tensors[name])
                local.copy_(values[where])


def quantizing(
    give: Give,
    model: CausalLM,
    codes: Callable[[str], Mapping[str, Tensor] | None] = lambda name: None,
    done: Callable[[str], None] = lambda name: None,
) -> Give:
    """What ``give`` fills, and codes for the weights that the model keeps as such: of these it fills one at a time, whole, which is gone
    when its codes are there. All that hold a weight must be given together.

    Args:
        codes: a weight's, where they are there already.
        done: hears of each weight whose codes were given by these, and have been copied.
    """
    kept = {name for weight in model.quantized.values() for name in weight.kept}

    @torch.no_grad()
    def give_codes(tensors: Mapping[str, Tensor]) -> None:
        give({name: tensor for name, tensor in tensors.items() if name not in kept})
        computes = next((p.device for p in model.parameters() if p.device.type != "cpu"), None)
        for name, weight in model.quantized.items():
            if name not in tensors:
                continue
            values = there_already = codes(name)
            if values is None:
                there = tensors[name].device
                device = computes or there if name in model.elsewhere else there  # codes are made faster where the model computes
                whole = torch.empty(weight.shape, dtype=weight.dtype, device=device)
                give({name: whole})
                values = weight.quantize(whole)
            for part, value in values.items():
                local, where = local_part(tensors[part])
                local.copy_(value[where])
            if there_already is not None:
                done(name)

    return give_codes if kept else give


def _chunks(first: int, last: int, name: str, seed: int, init: Init) -> Iterator[tuple[int, Tensor]]:
    """``(position, values)`` covering elements ``first … last`` of the flattened parameter."""
    for chunk in range(first // _CHUNK, -(-last // _CHUNK)):
        begin = chunk * _CHUNK
        digest = hashlib.sha256(f"{seed}/{name}/{chunk}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        if init.bound:
            values = (torch.rand(_CHUNK, generator=generator, dtype=torch.float32, device="cpu") * 2 - 1) * init.bound
        else:
            values = torch.randn(_CHUNK, generator=generator, dtype=torch.float32, device="cpu") * init.std
        low, high = max(first, begin), min(last, begin + _CHUNK)
        yield low, values[low - begin : high - begin]
