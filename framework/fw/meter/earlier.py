"""What a process holds before a run begins in it, which is not the run's: a notebook's own tensors, another model."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class Earlier:
    """The tensors that Python knows of now; they are kept by nobody for that."""

    def __init__(self) -> None:
        self._tensors = [weakref.ref(tensor) for tensor in in_one_piece()]

    def still(self, device: torch.device) -> dict[int, int]:
        """Of those that are there still, and on the device: address of the memory → its bytes."""
        there = (tensor for reference in self._tensors if (tensor := reference()) is not None and _is_on(tensor, device))
        return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in there}


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    return (tensor.device.type == device.type and None in (device.index, tensor.device.index)) or tensor.device == device


def in_one_piece() -> Iterator[Tensor]:
    """Every tensor that Python knows of whose memory is one allocation."""
    return (
        each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter) and each.layout == torch.strided and _has_memory(each)
    )


def _has_memory(tensor: Tensor) -> bool:
    """Not so of those that stand for others while torch.compile traces, some of which it keeps."""
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True
