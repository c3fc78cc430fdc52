"""How fast memory can be read."""

from __future__ import annotations

import time
from statistics import median

import torch

_BYTES = 256 << 20
"""More than processors keep to themselves."""
_TIMES = 5


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second, by adding up a long vector; of the device's own memory, with the threads that torch has now."""
    x = torch.ones(_BYTES // 4, device=device)
    taken = []
    for _ in range(_TIMES + 1):
        begin = time.perf_counter()
        x.sum().item()
        taken.append(time.perf_counter() - begin)
    return _BYTES / median(taken[1:])
