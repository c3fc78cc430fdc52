"""Sums over parameters that ranks divide between them."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate


def divides(placement: Placement, dims: Collection[int]) -> bool:
    """Whether a placement cuts one of these dimensions; strided shards, of FSDP over tensor parallelism, are a class of their own."""
    return not isinstance(placement, Replicate) and placement.dim in dims  # type: ignore[attr-defined]


def summed(partial: Tensor, parameter: Tensor, dims: Collection[int]) -> Tensor:
    """The sum over all ranks that divide ``dims`` of ``parameter``, in place. Collective where they do.

    Args:
        partial: what this rank's part adds to it.
    """
    if isinstance(parameter, DTensor):
        for number, placement in enumerate(parameter.placements):
            if divides(placement, dims):
                dist.all_reduce(partial, group=parameter.device_mesh.get_group(number))
    return partial


def norm(kept: Tensor, parameter: Tensor) -> Tensor:
    """The L2 norm of a whole tensor that is divided as ``parameter`` is, of which this rank has ``kept``; a scalar in fp32."""
    square = torch.linalg.vector_norm(kept, dtype=torch.float32).double().square()
    return summed(square, parameter, range(parameter.dim())).sqrt().float()


def reduced(kept: Tensor, parameter: Tensor, dim: int) -> Tensor:
    """A rank's part of a state that has size 1 along ``dim``, and is divided as the parameter is along the others."""
    if not isinstance(parameter, DTensor):
        return kept
    placements = [Replicate() if divides(p, [dim]) else p for p in parameter.placements]
    shape = torch.Size(1 if i == dim else size for i, size in enumerate(parameter.shape))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(kept, parameter.device_mesh, placements, run_check=False, shape=shape, stride=stride)
