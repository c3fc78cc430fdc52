"""What a save takes of host memory and of disks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fw.checkpointing.pieces import kept_elements
from fw.checkpointing.staging import PINNED_BYTES, staged_bytes
from fw.kinds.checkpoint import Kept, Part, Writes
from fw.recipe import Recipe

Tensors = Mapping[str, Mapping[str, Part]]


@dataclass(frozen=True)
class Saved:
    """What a save takes, by rank.

    Attributes:
        writes: as the checkpoint plugin says.
        copies: bytes of the copies that each rank has in host memory while a checkpoint is written, and keeps for the next; none where
            training waits instead.
        pieces: bytes that a rank keeps of all that is saved, and reads again.
    """

    writes: Sequence[Writes]
    copies: Sequence[int]
    pieces: int


def saved(recipe: Recipe, tensors: Tensors, on_gpu: bool) -> Saved:
    """Of a rank's tensors, for all ranks that keep as much.

    Args:
        on_gpu: whether tensors come from there, through page-locked buffers.
    """
    ranks = recipe.world_size
    originals = list({id(part.tensor): part.tensor for group in tensors.values() for part in group.values()}.values())
    copies = [0] * ranks
    if recipe.checkpoint.config.asynchronous:
        pinned = 2 * PINNED_BYTES if on_gpu else 0
        copies = [nbytes + pinned if nbytes else 0 for nbytes in _staged(originals, ranks)]
    own = sum(kept_elements(tensor) * tensor.dtype.itemsize for tensor in originals)
    return Saved(recipe.checkpoint.writes(tensors, ranks), copies, own)


def _staged(tensors: Sequence[Tensor | Kept], ranks: int) -> list[int]:
    """What each rank copies: tensors that several keep alike they give in turn (:meth:`fw.checkpointing.pieces.Layout.givers`)."""
    found = [0] * ranks
    by_turn: dict[tuple[DeviceMesh | None, tuple[int, ...], int], list[int]] = {}
    for number, tensor in enumerate(tensors):
        mesh, repeated, holders = _holders(tensor, ranks)
        size = staged_bytes(kept_elements(tensor) * tensor.dtype.itemsize)
        by_turn.setdefault((mesh, repeated, holders), [0] * holders)[number % holders] += size
    for (mesh, repeated, holders), turns in by_turn.items():
        for rank in range(ranks):
            turn = 0 if holders == 1 else rank if mesh is None else _place(mesh, repeated, rank, ranks)
            found[rank] += sum(turns) // holders if turn is None else turns[turn]
    return found


def _holders(tensor: Tensor | Kept, ranks: int) -> tuple[DeviceMesh | None, tuple[int, ...], int]:
    """The mesh that divides it, the dimensions of that along which it is repeated, and how many ranks keep the same."""
    if isinstance(tensor, Kept):
        return None, (), 1
    if not isinstance(tensor, DTensor):
        return None, (), ranks
    mesh = tensor.device_mesh
    repeated = tuple(dimension for dimension, placement in enumerate(tensor.placements) if placement.is_replicate())
    parts = prod(mesh.size(dimension) for dimension in range(mesh.ndim) if dimension not in repeated)
    return mesh, repeated, max(1, ranks // parts)


def _place(mesh: DeviceMesh, repeated: Sequence[int], rank: int, ranks: int) -> int | None:
    """Of a rank among those that keep the same, in their order; None where they are of several meshes.

    A mesh of all ranks counts them along its dimensions, the last one first.
    """
    if mesh.size() < ranks:
        return None
    coordinate: list[int] = []
    for dimension in reversed(range(mesh.ndim)):
        rank, along = divmod(rank, mesh.size(dimension))
        coordinate.insert(0, along)
    place = 0
    for dimension in repeated:
        place = place * mesh.size(dimension) + coordinate[dimension]
    return place
