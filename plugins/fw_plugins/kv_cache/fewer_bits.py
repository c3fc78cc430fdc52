"""Which way of keeping keys and values in fewer bits options ask for."""

from __future__ import annotations

from typing import Literal

import torch

from fw.api import KVNeeds, UserError, capability_of
from fw_plugins.kv_cache.keeping import Float8, Int4, Int8, Keeping

To = Literal["int8", "int4", "fp8"]
_FP8_SINCE = (8, 9)
"""Compute capability: Ada and Hopper."""


def check_group(group: int) -> None:
    """Numbers of a head that share scales.

    Raises:
        UserError: kernels do not know such groups.
    """
    if group < 16 or group % 16:
        raise UserError(f"kv_cache.group: {group} is no multiple of 16")


def keeping_in(to: To, group: int, dtype: torch.dtype) -> Keeping:
    """Of numbers that are computed in ``dtype``."""
    if to == "fp8":
        return Float8(dtype)
    return {"int8": Int8, "int4": Int4}[to](dtype, group)


def keeping_for(to: To, group: int, needs: KVNeeds) -> Keeping:
    """Of a model, on a device.

    Raises:
        UserError: a head cannot be divided so, or the device has no such numbers.
    """
    if to == "fp8" and (capability_of(needs.device) or (0, 0)) < _FP8_SINCE:
        raise UserError("kv_cache.to: fp8 needs a GPU of compute capability 8.9 or more; int8 takes as little, anywhere")
    if to == "int4" and (odd := [shape.head_dim for shape in needs.shapes if shape.head_dim % 2]):
        raise UserError(f"kv_cache.to: int4 needs an even head dimension, and the model's is {odd[0]}; use int8")
    return keeping_in(to, group, needs.dtype)
