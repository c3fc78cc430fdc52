"""Which ranks keep parts of the same size, so that one stands for all."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from fw.assemble import build
from fw.kinds.data import Rows
from fw.planning.trace import TRACED, as_rank
from fw.recipe import Recipe

Layout = tuple[tuple[int, ...], DeviceMesh, tuple[Placement, ...]]
"""Of a DTensor: shape, mesh and placements."""


def ranks_alike(recipe: Recipe, vocab_size: int, rows: Rows) -> list[int]:
    """For each rank the first one whose parts of all parameters have the shapes of its own."""
    with as_rank(recipe, 0) as mesh:
        if mesh is None:
            return [0]
        model = build(recipe, vocab_size, mesh, TRACED, rows).model
        layouts = {(tuple(p.shape), p.device_mesh, tuple(p.placements)) for p in model.parameters() if isinstance(p, DTensor)}
        uneven = [layout for layout in layouts if not _is_even(layout)]
        coordinates = {m: [tuple((m.mesh == rank).nonzero()[0].tolist()) for rank in range(recipe.world_size)] for _, m, _ in uneven}
    first: dict[tuple[tuple[int, ...], ...], int] = {}
    return [
        first.setdefault(tuple(local_shape(layout, coordinates[layout[1]][rank]) for layout in uneven), rank)
        for rank in range(recipe.world_size)
    ]


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
