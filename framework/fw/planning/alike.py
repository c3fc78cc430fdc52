"""Which ranks keep parts of the same size, so that one stands for all."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from fw.assemble import build
from fw.kinds.data import Rows
from fw.planning.trace import TRACED, as_rank
from fw.recipe import Recipe

Layout = tuple[tuple[int, ...], DeviceMesh, tuple[Placement, ...]]
"""Of a DTensor: shape, mesh and placements."""


_MOST = 8
"""Ranks that are planned, at most, of those that :meth:`ShardingPlugin.share` tells apart."""


def ranks_alike(recipe: Recipe, vocab_size: int, rows: Rows) -> list[int]:
    """For each rank the first one whose parts of all parameters have the shapes of its own, and whose share is equal.

    Where shares are many, the next larger one of a few, so that no rank is planned too small.
    """
    with as_rank(recipe, 0) as mesh:
        if mesh is None:
            return [0]
        built = build(recipe, vocab_size, mesh, TRACED, rows)
        ranks = range(recipe.world_size)
        layouts = {(tuple(p.shape), p.device_mesh, tuple(p.placements)) for p in built.model.parameters() if isinstance(p, DTensor)}
        uneven = [layout for layout in layouts if not _is_even(layout)]
        coordinates = {m: [tuple((m.mesh == rank).nonzero()[0].tolist()) for rank in ranks] for _, m, _ in uneven}
        shares = [recipe.sharding.share(built.model, recipe.mesh_shape, built.spec, rank) for rank in ranks]
    same_shapes: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for rank in ranks:
        same_shapes.setdefault(tuple(local_shape(layout, coordinates[layout[1]][rank]) for layout in uneven), []).append(rank)
    alike = {rank: like for those in same_shapes.values() for rank, like in _by_share({rank: shares[rank] for rank in those}).items()}
    return [alike[rank] for rank in ranks]


def _by_share(shares: Mapping[int, tuple[int, ...]]) -> dict[int, int]:
    """For each rank the first of equal share, or, of more than :data:`_MOST` shares, of the next that is chosen: evenly, from small to the
    largest."""
    first: dict[tuple[int, ...], int] = {}
    for rank, share in shares.items():
        first.setdefault(share, rank)
    different = sorted(first)
    chosen = sorted({different[-(-len(different) * (n + 1) // _MOST) - 1] for n in range(_MOST)})
    return {rank: first[chosen[bisect_left(chosen, share)]] for rank, share in shares.items()}


def _is_even(layout: Layout) -> bool:
    shape, mesh, placements = layout
    parts = [1] * len(shape)
    for dimension, placement in enumerate(placements):
        if (dim := _sharded(placement)) is not None:
            parts[dim] *= mesh.size(dimension)
    return all(size % n == 0 for size, n in zip(shape, parts, strict=True))


def local_shape(layout: Layout, coordinate: Sequence[int]) -> tuple[int, ...]:
    """Shape of the part at a coordinate of the mesh: chunks of ⌈n / ranks⌉, the last ones smaller or empty.

    Strided shards, of FSDP over tensor parallel, are cut after the others of their dimension.
    """
    shape, mesh, placements = layout
    local = list(shape)
    order = sorted(range(len(placements)), key=lambda d: not isinstance(placements[d], Shard))
    for dimension in order:
        if (dim := _sharded(placements[dimension])) is not None:
            chunk = math.ceil(local[dim] / mesh.size(dimension))
            local[dim] = min(max(local[dim] - coordinate[dimension] * chunk, 0), chunk)
    return tuple(local)


def _sharded(placement: Placement) -> int | None:
    """The dimension it cuts."""
    dim = getattr(placement, "dim", None)
    return dim if isinstance(dim, int) else None
