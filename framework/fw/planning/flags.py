"""Which flags are known where nothing is computed: values are finite, so that what looks for others finds none."""

from __future__ import annotations

import operator
import weakref
from typing import Any

import torch
from torch import Tensor

from fw.planning.leaves import tensors

_aten = torch.ops.aten
_ZERO = {_aten.zeros, _aten.zeros_like, _aten.new_zeros, _aten.isnan, _aten.isinf, _aten.zero_}
_LOGICAL = {_aten.logical_or, _aten.bitwise_or, _aten.logical_and, _aten.bitwise_and, _aten.mul, _aten.mul_}
_ALIKE = {
    *(_aten.max, _aten.amax, _aten.any, _aten.all, _aten.abs, _aten.maximum, _aten.stack, _aten.cat),
    *(_aten._to_copy, _aten.copy_, _aten.clone, _aten.detach, _aten.alias, _aten.view, _aten.reshape, _aten._unsafe_view),
    *(_aten.select, _aten.slice, _aten.squeeze, _aten.unsqueeze, _aten.expand, _aten.t, _aten.transpose),
}
_COMPARED = {getattr(_aten, name): getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_SUMS = {_aten.add, _aten.add_, _aten.sum}
_NOT = {_aten.logical_not, _aten.bitwise_not}
_PASSED_ON = _LOGICAL | _ALIKE | _SUMS | _NOT


class Flags:
    """Tensors without bytes all of whose elements are known to be 0, or to be 1."""

    def __init__(self) -> None:
        self._known: dict[int, bool] = {}
        """By the address of a storage object."""

    def saw(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operator has run."""
        value = self._value(func.overloadpacket, args, kwargs)
        changed = tensors(args[:1]) if func._schema.is_mutable else []
        for tensor in (*tensors(out), *changed):
            self._note(tensor, value)

    def of(self, tensor: Tensor) -> bool:
        """Its value; 1 where nothing is known."""
        return self._known.get(tensor.untyped_storage()._cdata, True)

    def _value(self, packet: Any, args: Any, kwargs: Any) -> bool | None:
        if packet in _ZERO:
            return False
        if packet is _aten.isfinite:
            return True
        if packet in _COMPARED:
            if args[0] is args[1]:  # what is not a number is not itself
                return bool(_COMPARED[packet](1, 1))
            return bool(_COMPARED[packet](self.of(args[0]), args[1])) if isinstance(args[1], int | float) else None
        if packet not in _PASSED_ON:
            return None
        given = [self._known.get(t.untyped_storage()._cdata) for t in tensors((args[1:] if packet is _aten.copy_ else args, kwargs))]
        value = given[0] if given and all(v == given[0] for v in given) else None
        if packet in _NOT:
            return None if value is None else not value
        if packet in _SUMS:  # of ones it is another number
            added = packet is not _aten.sum and any(isinstance(number, int | float) and number for number in args)
            return False if value is False and not added else None
        return value

    def _note(self, tensor: Tensor, value: bool | None) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if value is None:
            self._known.pop(key, None)
        elif self._known.setdefault(key, value) != value:
            self._known[key] = value
        else:
            weakref.finalize(storage, self._known.pop, key, None).atexit = False
