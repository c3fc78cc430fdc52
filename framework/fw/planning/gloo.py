"""What gloo takes for a collective besides what ranks exchange (ProcessGroupGloo.cpp of torch 2.13)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

_GATHERS = ("c10d::_allgather_base_", "_c10d_functional::all_gather_into_tensor")
_SCATTERS = ("c10d::_reduce_scatter_base_", "_c10d_functional::reduce_scatter_tensor")


def own_bytes(func: Any, args: Any, out: Any) -> int:
    """Bytes of its buffers: gathers go to a flat tensor first, and what is summed and scattered is cloned. Others need none."""
    name = func._schema.name
    if name in _GATHERS:
        return _first(args[0] if name == _GATHERS[0] else out)
    if name in _SCATTERS:
        return _first(args[1] if name == _SCATTERS[0] else args[0])
    return 0


def _first(tensor: Any) -> int:
    return tensor.numel() * tensor.element_size() if isinstance(tensor, Tensor) else 0
