"""What CUDA's sort takes for itself, which no fake kernel knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BY_BLOCKS, _LARGE, _MANY = 4096, 1_000_000, 128
"""Elements of a row that is sorted in place, and of one that is sorted by itself; rows that are sorted in segments."""


def sort_scratch_bytes(func: Any, args: Any) -> list[int]:
    """Of each allocation besides the results; empty for all other operators.

    ``launch_stable_sort_kernel`` of aten/src/ATen/native/cuda/SortStable.cu: indices of a row, or of all, and the other halves of cub's
    double buffers of keys and indices. A few large rows are sorted as one, and once more by their rows.
    """
    if func.overloadpacket is not torch.ops.aten.sort:
        return []
    x: Tensor = args[0]
    row = x.shape[-1] if x.dim() else 1
    if row <= _BY_BLOCKS:
        return []
    rows, key_bytes = x.numel() // row, x.element_size()
    if rows == 1 or row >= _LARGE:
        return [8 * row, (key_bytes + 8) * row]
    both = [8 * x.numel(), (key_bytes + 8) * x.numel()]
    return both if rows >= _MANY else [8 * x.numel(), key_bytes * x.numel(), *both]
