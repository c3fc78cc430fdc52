"""The tensors among an operator's arguments and results."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def tensors(values: Any) -> list[Tensor]:
    """Those of lists, tuples and dicts within one another, in order.

    Operators are given nothing else, and a plan asks at each several times: this takes a fifth of what ``torch.utils._pytree`` does, which
    knows containers of all kinds.
    """
    found: list[Tensor] = []
    _collect(values, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, list | tuple):
        for each in value:
            _collect(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            _collect(each, found)
