"""What of a tensor is this rank's."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """The part of a DTensor, which shares its memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
