"""Who holds what of a tensor, who sends what to whom, and how a whole is put together from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fw.checkpointing.placement import is_dtensor, local_part
from fw.kinds.checkpoint import Kept, Part, Piece, Ranks, Region

Where = Sequence[Any] | None
"""A :data:`Region` as it travels: ``[[start, stop], …]`` for a box, ``[start, stop]`` of the flattened tensor, None for nothing."""


class Placed(Kept):
    """A tensor of torch's: sharded as a DTensor, or the same on every rank."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def piece(self) -> Piece | None:
        """The local part; nothing where a rank's is empty."""
        local, where = local_part(self._tensor)
        if local.numel() == 0 and self.shape.numel():
            return None
        return Piece(where, lambda: local)


def kept(tensor: Tensor | Kept) -> Kept:
    """A tensor as its pieces."""
    return tensor if isinstance(tensor, Kept) else Placed(tensor)


def kept_elements(tensor: Tensor | Kept) -> int:
    """That this rank keeps of a tensor; where they stand is not looked at, which for strided shards takes long."""
    if isinstance(tensor, Tensor):
        return (tensor.to_local() if is_dtensor(tensor) else tensor).numel()
    piece = tensor.piece()
    if piece is None:
        return 0
    return math.prod(one.stop - one.start for one in ([piece.where] if isinstance(piece.where, slice) else piece.where))


def is_divided(part: Part) -> bool:
    """Whether this rank does not keep all of the tensor that it is of."""
    return kept_elements(part.tensor) < math.prod(part.tensor.shape)


def encode(piece: Piece | None) -> Where:
    """As it travels."""
    if piece is None:
        return None
    if isinstance(piece.where, slice):
        return [piece.where.start, piece.where.stop]
    return [[s.start, s.stop] for s in piece.where]


def _decode(where: Sequence[Any]) -> Region:
    if where and not isinstance(where[0], list):
        return slice(*where)
    return tuple(slice(*pair) for pair in where)


@dataclass(frozen=True)
class Share:
    """What one rank gives of a part.

    Attributes:
        rank: the giver.
        there: in its piece.
        here: in the part's region of the parameter; where ``there`` is a slice of the flattened piece, of the flattened region.
    """

    rank: int
    there: Region
    here: Region


class Layout:
    """What every rank keeps of every tensor: asked once, and remembered for as long as nothing changes."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._own: list[Where] = []
        self._all: list[list[Where]] = []

    def update(self, tensors: Sequence[Kept]) -> None:
        """Take notice of where the tensors are, all of them in one order on all ranks. Collective."""
        own = [encode(tensor.piece()) for tensor in tensors]
        changed = own != self._own or not self._all
        if any(self.ranks.gather(changed)):
            self._own, self._all = own, self.ranks.gather(own)

    def holders(self, number: int) -> dict[int, Region]:
        """Ranks that keep something of a tensor, by its place in the order, and what."""
        return {rank: _decode(where) for rank, has in enumerate(self._all) if (where := has[number]) is not None}

    def givers(self, number: int, writer: int | None) -> dict[int, Region]:
        """Of ranks that keep the same, the one that gives it to ``writer``: itself if it can, else each in turn."""
        by_region: dict[str, list[tuple[int, Region]]] = {}
        for rank, region in self.holders(number).items():
            by_region.setdefault(repr(region), []).append((rank, region))
        chosen = {}
        for same in by_region.values():
            own = [pair for pair in same if pair[0] == writer]
            rank, region = own[0] if own else same[number % len(same)]
            chosen[rank] = region
        return chosen

    def shares(self, number: int, part: Part, writer: int) -> list[Share]:
        """What makes up a part of that tensor; nothing for a part without elements."""
        found = []
        for rank, region in self.givers(number, writer).items():
            both = _overlap(region, part)
            if both is not None:
                found.append(Share(rank, *both))
        return found


def _overlap(region: Region, part: Part) -> tuple[Region, Region] | None:
    """What a piece and a part have in common: in the piece, and in the part's region."""
    wanted = part.region
    if isinstance(region, slice):
        # A part is whole, or whole rows of it, so its elements follow one another in the flattened parameter.
        shape = part.tensor.shape
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        first = sum(s.start * stride for s, stride in zip(wanted, strides, strict=True))
        count = math.prod(s.stop - s.start for s in wanted)
        low, high = max(region.start, first), min(region.stop, first + count)
        if low >= high:
            return None
        return slice(low - region.start, high - region.start), slice(low - first, high - first)
    both = [(max(k.start, w.start), min(k.stop, w.stop)) for k, w in zip(region, wanted, strict=True)]
    if any(low >= high for low, high in both):
        return None
    there = tuple(slice(low - k.start, high - k.start) for (low, high), k in zip(both, region, strict=True))
    here = tuple(slice(low - w.start, high - w.start) for (low, high), w in zip(both, wanted, strict=True))
    return there, here


def region_shape(part: Part) -> tuple[int, ...]:
    """Of a part's region in the parameter."""
    return tuple(s.stop - s.start for s in part.region)


def cut(values: Tensor, where: Region) -> Tensor:
    """A share of a piece; a view where it can be."""
    return values.reshape(-1)[where] if isinstance(where, slice) else values[where]


def assemble(part: Part, shares: Sequence[Share], rank: int, own: Tensor | None, receive: Callable[[Tensor, Share], None]) -> Tensor:
    """A part as its file holds it, on the host.

    Args:
        own: this rank's piece, if it gives any of the part.
        receive: fills a contiguous tensor with the share of another rank.

    Returns:
        a view of ``own`` where that is all of it.
    """
    shape = region_shape(part)
    if len(shares) == 1 and shares[0].rank == rank and own is not None:
        return part.as_in_file(cut(own, shares[0].there).reshape(shape).to("cpu"))
    whole = torch.empty(shape, dtype=part.dtype)
    for share in shares:
        target = cut(whole, share.here)
        if share.rank == rank:
            assert own is not None
            target.copy_(cut(own, share.there))
        elif target.is_contiguous():
            receive(target, share)
        else:
            got = torch.empty(target.shape, dtype=target.dtype)
            receive(got, share)
            target.copy_(got)
    return part.as_in_file(whole)
