"""A computation that is made once in Python, and again without it: on the CPU, what a graph is on a GPU.

While it is recorded, every tensor it makes lies in memory of the recording's own, in which one takes the place of another that is gone. To
make it again is to make the same calls on the same memory: kernels of fw's own at once and with nothing between them, and each operator of
torch's from Python, without whatever called it.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fw.kernels import choosing, elementwise
from fw.kernels.calls import Kernel, heard

_AGAIN = Kernel("fw_again", [ctypes.c_void_p, ctypes.c_long])
_aten = torch.ops.aten
_IN_PARTS = torch._C.DispatchKey.CompositeImplicitAutograd
_CHUNK = 1 << 20
_ALIGNED = 64
_MOST_OF_WEIGHTS = 1 << 20
"""Bytes that an operator may make of nothing but what lasts: results are copied to where they are to be."""
_UNWRITTEN = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.empty_strided.default,
    _aten.new_empty_strided.default,
}
_CONVERTED = {_aten._to_copy.default, _aten.clone.default}
_INDEXED = {_aten.index.Tensor, _aten._unsafe_index.Tensor}
_DIFFERS = {torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


class NotRepeatable(Exception):
    """It cannot be made again without Python; why, as a sentence."""


class Tape:
    """What was recorded. Gives its results in the same tensors each time; one thread plays it.

    Attributes:
        memory_bytes: of its own.
    """

    def __init__(self, items: Sequence[Callable[[], object]], held: Sequence[Any], memory_bytes: int) -> None:
        self._items, self._held = items, held
        self.memory_bytes = memory_bytes

    def play(self) -> None:
        """Again, of what is in the inputs now."""
        for item in self._items:
            item()

    @property
    def length(self) -> int:
        """Pieces, each of kernels one after another, or of an operator."""
        return len(self._items)


class _Calls:
    """Kernels, one after another."""

    def __init__(self) -> None:
        self._made: list[elementwise.Call] = []
        self._array: Any = None
        self._words: list[ctypes.Array[ctypes.c_int64]] = []

    def append(self, kernel: Kernel, words: Sequence[int]) -> None:
        call = kernel, words
        if self._made and (both := elementwise.at_once(self._made[-1], call)) is not None:
            self._made.pop()
            call = both
        self._made.append(call)

    def __call__(self) -> None:
        if self._array is None:
            self._words = [(ctypes.c_int64 * len(words))(*words) for _, words in self._made]
            made = [
                word
                for (kernel, _), words in zip(self._made, self._words, strict=True)
                for word in (kernel.with_words, ctypes.addressof(words))
            ]
            self._array = (ctypes.c_void_p * len(made))(*made)
        _AGAIN(self._array, len(self._made))


class _Ranges:
    """Of addresses."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def add(self, begin: int, size: int) -> None:
        if size and begin not in self:
            at = bisect.bisect(self._begins, begin)
            self._begins.insert(at, begin)
            self._ends.insert(at, begin + size)

    def __contains__(self, address: int) -> bool:
        at = bisect.bisect(self._begins, address) - 1
        return at >= 0 and address < self._ends[at]


class _Arena:
    """Memory that lasts, in pieces that are taken again when the tensors in them are gone."""

    def __init__(self) -> None:
        self.chunks: list[Tensor] = []
        self._left = 0
        self._free: dict[int, list[memoryview]] = {}
        self._within = _Ranges()

    def __contains__(self, address: int) -> bool:
        return address in self._within

    def like(self, x: Tensor) -> Tensor:
        """One of the same shape, strides and dtype, with anything in it."""
        room = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        taken = self._take(-(-room * x.dtype.itemsize // _ALIGNED) * _ALIGNED)
        return torch.frombuffer(taken, dtype=x.dtype, count=room).as_strided(x.shape, x.stride())

    def _take(self, size: int) -> memoryview:
        free = self._free.setdefault(size, [])
        if free:
            place = free.pop()
        else:
            if self._left < size:
                self.chunks.append(torch.empty(max(size, _CHUNK), dtype=torch.uint8))
                self._left = self.chunks[-1].numel()
                self._within.add(self.chunks[-1].data_ptr(), self._left)
            chunk = self.chunks[-1]
            place = memoryview(chunk.numpy())[chunk.numel() - self._left :][:size]  # type: ignore[arg-type]
            self._left -= size
        taken = place[:]  # gone with the last tensor in it
        weakref.finalize(taken, free.append, place).atexit = False
        return taken

    def alias(self, x: Tensor) -> Tensor:
        """The same memory, which is not held by it."""
        chunk = next(c for c in self.chunks if c.data_ptr() <= x.data_ptr() < c.data_ptr() + c.numel())
        at = (x.data_ptr() - chunk.data_ptr()) // x.dtype.itemsize
        return torch.empty(0, dtype=x.dtype).set_(chunk.untyped_storage(), at, x.shape, x.stride())


class Recorder(TorchDispatchMode):
    """Records what is computed within it from ``inputs``, whose values may differ each time, and of what stays as it is.

    It is computed all the same where it turns out not to be repeatable.

    Args:
        lasting: parameters, tables: whatever is there before and after. Only kernels may write to it.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch imports its compiler, for a second within a request, only not to use it on what is below."""
        return False

    def __init__(self, inputs: Sequence[Tensor], lasting: Iterable[Tensor]) -> None:
        super().__init__()
        self._items: list[Callable[[], object]] = []
        self._held: list[Any] = [*inputs]
        self._arena = _Arena()
        self._inputs, self._lasting, self._constant = _Ranges(), _Ranges(), _Ranges()
        for x in inputs:
            self._inputs.add(*_range(x))
        for x in lasting:
            self._lasting.add(*_range(x))
        self._why: str | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """What is computed within is recorded."""
        with self, heard(self._kernel):
            yield

    def tape(self, *results: Tensor) -> Tape:
        """The recording, which leaves its results in these.

        Raises:
            NotRepeatable: with the reason.
        """
        if self._why is not None:
            raise NotRepeatable(self._why)
        return Tape(self._items, [*self._held, self._arena, *results], sum(chunk.nbytes for chunk in self._arena.chunks))

    def _refuse(self, why: str) -> None:
        self._why = self._why or why

    def _varies(self, x: Tensor) -> bool:
        """Whether it differs each time; what nobody knows would never."""
        if not x.numel():
            return False
        if x.data_ptr() in self._arena or x.data_ptr() in self._inputs:
            return True
        if x.data_ptr() not in self._lasting and x.data_ptr() not in self._constant:
            self._refuse("it reads a tensor that is neither among its inputs nor the model's")
        return False

    def _kernel(self, kernel: Kernel, given: Sequence[Any]) -> None:
        words = []
        for kind, argument in zip(kernel.arguments, given, strict=True):
            if kind is ctypes.c_float:
                words.append(struct.unpack("q", struct.pack("d", argument))[0])
            elif isinstance(argument, ctypes.Array):
                self._held.append(argument)
                words.append(ctypes.addressof(argument))
            else:
                known = (self._arena, self._inputs, self._lasting, self._constant)
                if kind is ctypes.c_void_p and not any(argument in ranges for ranges in known):
                    self._refuse(f"{kernel.name} reads what is neither among its inputs nor the model's")
                words.append(int(argument))
        if not self._items or not isinstance(self._items[-1], _Calls):
            self._items.append(_Calls())
        calls = self._items[-1]
        assert isinstance(calls, _Calls)
        calls.append(kernel, words)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self._why is not None:
            return func(*args, **kwargs)
        if func.has_kernel_for_dispatch_key(_IN_PARTS):
            with self:  # as nothing does that needs no gradients: dropout that drops nothing is no chance, and a reshape may be a view
                if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _IN_PARTS):  # what is computed without this, too
                    return func._op_dk(_IN_PARTS, *args, **kwargs)
                return func.decompose(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(not x.is_cpu or x.layout is not torch.strided or type(x) not in (Tensor, torch.nn.Parameter) for x in given):
            self._refuse(f"{func} is of other tensors than the host's dense ones")
            return func(*args, **kwargs)
        varies = [self._varies(x) for x in given]
        if func is _aten.add.Tensor and len(given) == 2 and not kwargs and any(varies) and elementwise.applies(*given):
            out = self._arena.like(given[0])
            if elementwise.add(given[0], given[1], out):
                return out
        if func is _aten._to_copy.default and kwargs == {"dtype": torch.float32} and any(varies):
            out = self._arena.like(torch.empty_like(given[0], dtype=torch.float32))
            if choosing.widen(given[0], out):
                return out
        out = func(*args, **kwargs)
        made = out if isinstance(out, tuple | list) else [] if out is None else [out]
        if _may_differ(func, given) or not all(isinstance(x, Tensor) and x.layout is torch.strided for x in made):
            self._refuse(f"{func} may differ each time")
            return out
        if func._schema.is_mutable:
            self._again(func, args, kwargs, [], changes=True)
            return out
        before = {x.untyped_storage().data_ptr() for x in given}
        new = [x.numel() > 0 and x.untyped_storage().data_ptr() not in before for x in made]
        if not any(new):
            return out
        if func not in _UNWRITTEN and all(x.data_ptr() in self._constant for x in given):  # made of numbers in the code
            for x in made:
                self._constant.add(*_range(x))
            self._held += made
            return out
        if func not in _UNWRITTEN and not any(varies) and sum(x.nbytes for x in made) > _MOST_OF_WEIGHTS:
            self._refuse(f"{func} makes weights out of weights each time, which takes longer than Python does")
            return out
        placed = [self._arena.like(x) if is_new else x for x, is_new in zip(made, new, strict=True)]
        if func not in _UNWRITTEN:
            for to, x, is_new in zip(placed, made, new, strict=True):
                if is_new:
                    to.copy_(x)
            self._again(func, args, kwargs, [to if is_new else None for to, is_new in zip(placed, new, strict=True)])
        return type(out)(placed) if isinstance(out, tuple | list) else placed[0]

    def _again(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Sequence[Tensor | None], changes: bool = False) -> None:
        args, kwargs, out = tree_map_only(Tensor, self._kept, (args, kwargs, out))
        if changes:
            named = {argument.name: x for argument, x in zip(func._schema.arguments, args, strict=False)} | kwargs
            for argument in func._schema.arguments:
                x = named.get(argument.name)
                if argument.alias_info is not None and argument.alias_info.is_write and not (isinstance(x, Tensor) and self._varies(x)):
                    self._refuse(f"{func} changes what it is not to")
            self._items.append(functools.partial(func, *args, **kwargs))
        elif func in _CONVERTED and out[0] is not None:
            self._items.append(functools.partial(out[0].copy_, args[0]))
        else:
            self._items.append(functools.partial(_into, out, functools.partial(func, *args, **kwargs)))

    def _kept(self, x: Tensor) -> Tensor:
        return self._arena.alias(x) if x.numel() and x.data_ptr() in self._arena else x


def _may_differ(func: Any, given: Sequence[Tensor]) -> bool:
    """In more than numbers."""
    if func in _INDEXED:  # where nothing is asked for by a mask, there are as many each time
        return any(x.dtype in (torch.bool, torch.uint8) for x in given[1:])
    return bool(_DIFFERS & set(func.tags)) or func is _aten.lift_fresh.default


def _into(out: Sequence[Tensor | None], compute: Callable[[], Any]) -> None:
    found = compute()
    for to, x in zip(out, found if isinstance(found, tuple | list) else [found], strict=True):
        if to is not None:
            to.copy_(x)


def _range(x: Tensor) -> tuple[int, int]:
    storage = x.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
