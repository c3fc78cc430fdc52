"""Allocations of tensors that have no bytes.

Operators run under torch's fake tensors: the same dispatcher works out shapes, dtypes and strides, autograd keeps and frees the same
tensors, and no element is computed. The ledger sees each storage that an operator makes, and its end.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from fw.kernels.threads import of_torch
from fw.meter.account import Block, History, Recorder, Rules, Site
from fw.meter.devices import Device
from fw.planned import updates_by
from fw.planning.flags import Flags
from fw.planning.gloo import Gloo
from fw.planning.gpu import Gpu
from fw.planning.in_place import Sums, references
from fw.planning.kernels import momentary
from fw.planning.leaves import tensors
from fw.planning.nccl import Nccl
from fw.planning.patches import (
    ScalarsOnHost,
    converted_in_place,
    generator_states,
    long_lists_looked_through_once,
    places_of_parts_in,
    sharding_found_out_in,
    sharding_remembered,
    watched_resize,
)
from fw.planning.roofline import Exchange, Work, exchange, work
from fw.planning.updates import Updates

_aten, _prim = torch.ops.aten, torch.ops.prim
_VALUES = {_aten._local_scalar_dense.default, _aten.item.default, _aten.is_nonzero.default}
"""What Python asks for a value by; in inference mode none of these is made of others."""
_PLAIN = (Tensor, FakeTensor, torch.nn.Parameter)


class Touched(Exception):
    """An operator takes what was to be left alone."""


class Ledger(TorchDispatchMode):
    """Entered, all that is computed is fake, and what would be allocated is known.

    Values that Python asks for (:meth:`Tensor.item`) are 1, but 0 where that is known (:class:`Flags`): steps are finite, and branches that
    a value decides are not followed both ways. Collectives of a ``fake`` process group give back what they were given.

    Args:
        device: what memory is predicted of; None for the CPU, where all tensors are.
        costs: whether histories are to know what operators cost on the CPU; on a GPU they do.
        threads: that operators of the CPU divide their work among; None for as many as torch has here.
    """

    def __init__(self, device: Device | None = None, costs: bool = False, threads: int | None = None) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._live: dict[int, Block] = {}
        """By the address of the storage object."""
        self._recording: _Recording | None = None
        self._rules = Rules()
        self._stack = ExitStack()
        self.gpu = None if device is None else Gpu(device, self._came, self._went)
        gloo = Gloo(self._came, self._went, _key, self._live.__contains__)
        self._backend = gloo if self.gpu is None else Nccl(_key, self.gpu.exchanged)
        self._costs = costs and device is None
        self._threads = threads or of_torch()
        self._paused = False
        self._real_integers = False
        self._sums = Sums()
        self._flags = Flags()
        self._left_alone: frozenset[int] = frozenset()

    def __enter__(self) -> Ledger:
        references()  # found out where no other mode is
        self._stack.enter_context(self._fake)
        self._stack.enter_context(watched_resize(self._resized))
        self._stack.enter_context(self.gpu.entered() if self.gpu is not None else nullcontext())
        self._stack.enter_context(generator_states(self.on_host))
        self._stack.enter_context(ScalarsOnHost(self.on_host) if self.gpu is not None else nullcontext())
        self._stack.enter_context(converted_in_place())
        self._stack.enter_context(sharding_found_out_in(self._pause))
        self._stack.enter_context(places_of_parts_in(self._pause))
        self._stack.enter_context(sharding_remembered())
        self._stack.enter_context(long_lists_looked_through_once())
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    @property
    def live_bytes(self) -> int:
        """Allocated now."""
        return sum(block.nbytes for block in self._live.values())

    def on_host(self) -> AbstractContextManager[None]:
        """What is made within it is in host memory, which is another than a GPU's."""
        return self.gpu.on_host() if self.gpu is not None else nullcontext()

    def blocks(self, category: str) -> list[Block]:
        """Allocated now, of a category."""
        return [block for block in self._live.values() if block.category == category]

    def block_of(self, tensor: Tensor) -> Block | None:
        """What a tensor lies in; None where that is not the ledger's."""
        return self._live.get(_key(tensor))

    @contextmanager
    def leaving_alone(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Within it an operator that takes one of these raises :class:`Touched`."""
        before, self._left_alone = self._left_alone, frozenset(map(_key, tensors))
        try:
            yield
        finally:
            self._left_alone = before

    def _told(self, tensor: Tensor) -> tuple[Any, ...]:
        """What memory's coming and going may depend on, of one of the ledger's tensors."""
        block = self.block_of(tensor)
        on_host = self.gpu is not None and self.gpu.is_on_host(tensor)
        stream = 0 if self.gpu is None else self.gpu.stream
        return stream, on_host, None if block is None else (block.category, block.passing)

    def bind(self, tensor: Tensor, block: Block) -> None:
        """From now on it lies in ``block``."""
        self._live[_key(tensor)] = block

    def stand_in(self, block: Block) -> Tensor:
        """A tensor ``[nbytes]`` of bytes that lies in ``block``, whose coming is not recorded; its end is."""
        recording, self._recording = self._recording, None
        try:
            tensor = torch.empty(block.nbytes, dtype=torch.uint8)
        finally:
            self._recording = recording
        self.bind(tensor, block)
        return tensor

    def in_a_file(self, like: Tensor) -> Tensor:
        """A tensor of the same shape, strides and dtype, in mapped memory, which is nobody's own."""
        with self._pause():
            tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        self.bind(tensor, Block(0))
        if self.gpu is not None:
            self.gpu.mapped(tensor)
        return tensor

    @contextmanager
    def recording(self, device: torch.device, rules: Rules) -> Iterator[Recorder]:
        """Record what comes and goes, after garbage went; all tensors of a ledger are on one device."""
        assert self._recording is None, "one recording at a time"
        gc.collect()
        self._backend.settle()
        self._recording, self._rules = _Recording(self._live), rules
        found = self._recording
        updates = Updates(found.history, lambda: found.site, self._told)
        try:
            with updates_by(updates.stand_in), self.gpu.recording(found.history) if self.gpu is not None else nullcontext():
                yield found
        finally:
            self._recording, self._rules = None, Rules()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Subclasses go first, and come back with what they are made of.
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if self._paused or func is _prim.device.default:  # every other call asks where a tensor is, and changes nothing
            return func(*args, **kwargs)
        if self._left_alone and any(_key(tensor) in self._left_alone for tensor in self._own((args, kwargs))):
            raise Touched(f"{func} takes what was to be left alone")
        if func is _aten.equal.default:
            return True
        if func in _VALUES and getattr(args[0], "constant", None) is None:  # else it is known
            value = _value(args[0].dtype, self._flags.of(args[0]))
            return bool(value) if func is _aten.is_nonzero.default else value
        if self._real_integers and _is_about_integers(func, args, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if self._rules.is_exchange(func._schema.name):
            for tensor in self._own((args, kwargs)):
                if block := self._live.get(_key(tensor)):
                    block.exchange(self._rules.exchanged)
        if (result := self._backend.instead(func, args)) is not None:
            return result
        if (sum_of := self._sums.in_place(func, args)) is not None:
            return sum_of
        if self.gpu is not None:
            kwargs = self.gpu.placed(args, kwargs)
        out = func(*args, **kwargs)
        inside = self._inside(func, args, kwargs, out)
        if self._costs:
            self._cost(work(func, args, kwargs, out, lambda tensor: False))
        if self._rules.is_exchange(func._schema.name):
            self._cost(exchange(func, args, out) if self._costs else None)
            out = self._backend.exchange(func, args, out, self._rules.exchanged, self._own)
        self._flags.saw(func, args, kwargs, out)
        for tensor in self._own(out):
            self._saw(tensor, args[0] if func is _aten._to_copy.default else None)
            self._sums.saw(tensor)
        for block in inside:
            assert self._recording is not None
            self._recording.history.went(block)
        if self.gpu is not None:
            self.gpu.ran(func, args, kwargs, out)
        return out

    def _inside(self, func: Any, args: Any, kwargs: Any, out: Any) -> list[Block]:
        """What an operator takes for itself until its results are there."""
        if self._recording is None or self.gpu is not None:
            return []
        blocks = [Block(nbytes) for nbytes in momentary(func, args, kwargs, out, self._threads)]
        for block in blocks:
            block.site = self._recording.site
            self._recording.history.came(block)
        return blocks

    def _cost(self, cost: Work | Exchange | None) -> None:
        if cost is not None and self._recording is not None:
            self._recording.history.costs.append((len(self._recording.history.changes), cost))

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """What happens within it is no part of the program."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _own(self, values: Any) -> Iterator[Tensor]:
        """The ledger's tensors among these; not those that DTensors make to find out shapes."""
        for leaf in tensors(values):
            if isinstance(leaf, FakeTensor) and leaf.fake_mode is self._fake and leaf.device.type != "meta":
                yield leaf

    def _saw(self, tensor: Tensor, source: Tensor | None) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or (self.gpu is not None and self.gpu.takes(storage)):
            return
        category = self._live[_key(source)].category if source is not None and _key(source) in self._live else ""
        block = self._block(storage)
        if category in self._rules.copies:
            block.name(self._rules.copies[category])
        self._came(key, block)
        weakref.finalize(storage, self._went, key).atexit = False

    def _came(self, key: int, block: Block) -> None:
        self._live[key] = block
        if self._recording is not None:
            block.site = self._recording.site
            self._recording.history.came(block)

    def _went(self, key: int) -> None:
        block = self._live.pop(key)
        if self._recording is not None:
            self._recording.history.went(block)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Another block in its place: who gives memory back and takes it anew says again what it is for."""
        if (key := storage._cdata) in self._live:
            self._went(key)
            self._came(key, self._block(storage))

    def _block(self, storage: torch.UntypedStorage) -> Block:
        return Block(storage.nbytes(), stream=0 if self.gpu is None else self.gpu.stream)

    def ready(self, module: torch.nn.Module) -> None:
        """See to what wraps a model and reads values: DDP agrees on its buckets by numbers, which are small, and real here."""
        if isinstance(module, DistributedDataParallel):
            setattr(module, "reducer", _Reducer(module.reducer, self))  # noqa: B010 - of another type on purpose

    @contextmanager
    def real_integers(self) -> Iterator[None]:
        """Within it, int32 tensors that are made have bytes."""
        self._real_integers = True
        try:
            yield
        finally:
            self._real_integers = False


class _Recording(Recorder):
    """What happens to a ledger's blocks."""

    def __init__(self, live: dict[int, Block]) -> None:
        self._live = live
        self._before = list(live.values())
        for block in self._before:
            block.category, block.passing = _UNKNOWN, False
        self._history = History(before=self._before)
        self.site = Site()

    @property
    def history(self) -> History:
        return self._history

    def mark(self, name: str) -> None:
        self._history.mark(name)
        self.site = Site(phase=name)

    def enter(self, module: str) -> None:
        self.site = Site(module, self.site.phase)

    def known(self, category: str, tensors: Iterable[Tensor]) -> None:
        for block in self._blocks(tensors):
            if block.category == _UNKNOWN:
                block.category = category

    def known_rest(self, category: str) -> None:
        for block in self._before:
            if block.category == _UNKNOWN:
                block.category = category

    def name(self, category: str, tensors: Iterable[Tensor]) -> None:
        for block in self._blocks(tensors):
            block.name(category)

    def name_rest(self, category: str) -> None:
        for block in self._live.values():
            block.name(category)

    def _blocks(self, tensors: Iterable[Tensor]) -> Iterator[Block]:
        for tensor in tensors:
            if block := self._live.get(_key(tensor)):
                yield block


_UNKNOWN = ""


class _Reducer:
    """DDP's reducer, whose ranks agree on the order of gradients after the first backward."""

    def __init__(self, reducer: Any, ledger: Ledger) -> None:
        self._reducer, self._ledger = reducer, ledger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        with self._ledger.real_integers():
            rebuilt: bool = self._reducer._rebuild_buckets()
            return rebuilt


def _key(tensor: Tensor) -> int:
    """Of the memory of a plain tensor, or of this rank's part of a DTensor."""
    plain = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return int(plain.untyped_storage()._cdata)


def _is_about_integers(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator makes some, or has arguments that are real."""
    if any(isinstance(leaf, FakeTensor) for leaf in tensors((args, kwargs))):
        return False
    return func is not _aten.empty.memory_format or kwargs.get("dtype") == torch.int32


def _value(dtype: torch.dtype, flag: bool) -> bool | int | float:
    kind = bool if dtype == torch.bool else float if dtype.is_floating_point else int
    return kind(flag)
