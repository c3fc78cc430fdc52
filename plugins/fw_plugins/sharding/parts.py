"""What of a tensor is this rank's."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """The part of a DTensor, which shares its memory; any other tensor as it is. Autograd knows nothing of it.

    ``to_local`` would make a view of a parameter each time, and there are thousands of parameters.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
