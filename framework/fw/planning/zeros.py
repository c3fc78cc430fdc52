"""Which values are known to be zero where nothing is computed: flags that are raised only when something goes wrong."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_MAKE = {_aten.zeros, _aten.zeros_like, _aten.new_zeros, _aten.isnan, _aten.isinf, _aten.zero_}
_KEEP = {
    *(_aten.logical_or, _aten.bitwise_or, _aten.logical_or_, _aten.bitwise_or_, _aten.add, _aten.add_, _aten.mul, _aten.mul_),
    *(_aten.max, _aten.amax, _aten.sum, _aten.any, _aten.abs, _aten.maximum, _aten.stack, _aten.cat),
    *(_aten._to_copy, _aten.copy_, _aten.clone, _aten.detach, _aten.alias, _aten.view, _aten.reshape, _aten._unsafe_view),
    *(_aten.select, _aten.slice, _aten.squeeze, _aten.unsqueeze, _aten.expand, _aten.t, _aten.transpose, _aten.narrow),
}
"""Zero of zeros."""


class Zeros:
    """Of tensors without bytes. What is not known to be zero counts as one."""

    def __init__(self) -> None:
        self._zero: set[int] = set()
        """Storage objects, by their address."""

    def saw(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operator has run."""
        packet = func.overloadpacket
        given = list(_tensors((args, kwargs)))
        if packet is _aten.copy_:
            given = given[1:]
        added = [leaf for leaf in tree_leaves(args) if isinstance(leaf, int | float)] if packet in _SUMS else []
        is_zero = packet in _MAKE or (packet in _KEEP and bool(given) and not any(added) and all(self.has(t) for t in given))
        changed = func._schema.is_mutable
        for tensor in _tensors(out):
            if is_zero:
                self._note(tensor)
            elif changed:
                self._zero.discard(tensor.untyped_storage()._cdata)
        if changed and not is_zero:  # those that give nothing back
            for tensor in _tensors(args[:1]):
                self._zero.discard(tensor.untyped_storage()._cdata)

    def has(self, tensor: Tensor) -> bool:
        """Whether it is known to be zero."""
        return tensor.untyped_storage()._cdata in self._zero

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._zero:
            self._zero.add(key)
            weakref.finalize(storage, self._zero.discard, key).atexit = False


_SUMS = {_aten.add, _aten.add_}


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
