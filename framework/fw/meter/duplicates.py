"""Tensors with the same bytes that could be one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fw.meter.findings import TWICE, Finding

LEAST_BYTES = 2**20
"""What is smaller is not worth a word."""


def duplicates(tensors: Iterable[tuple[str, Tensor]], least_bytes: int = LEAST_BYTES) -> list[Finding]:
    """Of these, those whose storages are as large as each other, hold the same bytes and are not the same.

    Args:
        tensors: by name, of DTensors this rank's part; several of one storage count once.
        least_bytes: storages that are smaller are not looked at.
    """
    named: dict[int, tuple[str, Tensor]] = {}
    for name, whole in tensors:
        tensor = whole.to_local() if isinstance(whole, DTensor) else whole
        storage = tensor.untyped_storage()
        if storage.nbytes() >= least_bytes and storage.data_ptr() not in named:
            named[storage.data_ptr()] = (name, _bytes_of(tensor))
    alike: dict[tuple[torch.device, int, int], list[list[tuple[str, Tensor]]]] = defaultdict(list)
    for name, raw in named.values():
        classes = alike[raw.device, len(raw), _sum(raw)]
        same = next((members for members in classes if members[0][1].equal(raw)), None)
        if same is None:
            classes.append([(name, raw)])
        else:
            same.append((name, raw))
    return [
        Finding(TWICE, (len(members) - 1) * len(members[0][1]), len(members), " = ".join(name for name, _ in members))
        for classes in alike.values()
        for members in classes
        if len(members) > 1
    ]


def _bytes_of(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _sum(raw: Tensor) -> int:
    """Different where bytes are, but for chance; read once."""
    words = len(raw) // 8 * 8
    return int(raw[:words].view(torch.int64).sum())
