"""What torch does around operators, and what it would do with tensors that have no bytes: changed while a ledger is entered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.tensor import _dispatch as dtensor_dispatch, _sharding_prop as sharding_prop, _utils as places
from torch.distributed.tensor._ops import utils as strategies_of_operators
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import _StridedShard
from torch.overrides import TorchFunctionMode


@contextmanager
def watched_resize(resized: Any) -> Iterator[None]:
    """``resized`` is called with each storage that was resized in place, which no operator does."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        result = original(storage, nbytes)
        resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]


@contextmanager
def generator_states(on_host: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Whoever takes a generator's state along, for a repetition of dropout, takes a tensor of the host; nothing random is drawn."""
    get_rng_state, set_rng_state = torch.get_rng_state, torch.set_rng_state
    size = get_rng_state().numel()

    def state() -> Tensor:
        with on_host():
            return torch.empty(size, dtype=torch.uint8)

    torch.get_rng_state = state
    torch.set_rng_state = lambda new_state: None
    try:
        yield
    finally:
        torch.get_rng_state, torch.set_rng_state = get_rng_state, set_rng_state


class ScalarsOnHost(TorchFunctionMode):
    """A number made without saying where, as an optimizer's count of steps is, is in host memory whatever the device.

    Not by other functions in these ones' place: who asks torch for its constructors meanwhile would remember the others for good.
    """

    def __init__(self, on_host: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._on_host = on_host

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is None and (
            (func is torch.zeros and args == ((),)) or (func is torch.tensor and len(args) == 1 and isinstance(args[0], (int, float)))
        ):
            with self._on_host():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


@contextmanager
def sharding_found_out_in(pause: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """DTensors find out the shapes of results by operators on whole fake tensors, for which they take the mode that is there."""
    original = getattr(ShardingPropagator, "_fake_mode_lock", None)  # what they enter for that (torch 2.13)
    if original is None:
        yield
        return
    ShardingPropagator._fake_mode_lock = _Entered(pause)  # type: ignore[assignment]
    try:
        yield
    finally:
        ShardingPropagator._fake_mode_lock = original


@contextmanager
def places_of_parts_in(pause: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """DTensors work out where a rank's part begins with tensors of numbers, and ask for their values."""
    original = getattr(places, "_compute_local_shape_and_global_offset", None)  # torch 2.13
    if original is None:
        yield
        return

    def compute(*args: Any, **how: Any) -> Any:
        with pause(), unset_fake_temporarily():
            return original(*args, **how)

    places._compute_local_shape_and_global_offset = compute
    try:
        yield
    finally:
        places._compute_local_shape_and_global_offset = original


@contextmanager
def sharding_remembered() -> Iterator[None]:
    """DTensors look up again what they have found out about an operator, which they would not do in a trace of the compiler's."""
    original = getattr(dtensor_dispatch, "_are_we_tracing", None)  # what they ask (torch 2.13)
    if original is None:
        yield
        return
    dtensor_dispatch._are_we_tracing = lambda: False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dtensor_dispatch._are_we_tracing = original  # type: ignore[attr-defined]


@contextmanager
def long_lists_looked_through_once() -> Iterator[None]:
    """For each of a list of tensors that an optimizer steps, DTensors look through the whole list for strided shards, and through all ways
    to divide it, alike or not: a thousand parameters take a million looks."""
    with _strided_shards_looked_for_once(), _strategies_remembered():
        yield


@contextmanager
def _strategies_remembered() -> Iterator[None]:
    original = getattr(strategies_of_operators, "expand_to_full_mesh_op_strategy", None)  # torch 2.13
    if original is None:
        yield
        return
    known: dict[Any, Any] = {}

    def expand(mesh: Any, op_schema: Any, strategies: Any, **how: Any) -> Any:
        specs = [strategy.strategies for strategy in op_schema.args_strategy]
        if op_schema.kwargs_strategy or not str(op_schema.op).startswith("aten._fused_") or any(len(each) != 1 for each in specs):
            return original(mesh, op_schema, strategies, **how)
        key = op_schema.op, mesh, tuple(each[0].output_spec for each in specs), repr(strategies), repr(how)
        if key not in known:
            known[key] = original(mesh, op_schema, strategies, **how)
        return known[key]

    strategies_of_operators.expand_to_full_mesh_op_strategy = expand  # type: ignore[assignment]
    try:
        yield
    finally:
        strategies_of_operators.expand_to_full_mesh_op_strategy = original


@contextmanager
def _strided_shards_looked_for_once() -> Iterator[None]:
    original = getattr(sharding_prop, "_propagate_use_strided_shard_flag", None)  # torch 2.13
    if original is None:
        yield
        return
    found: dict[int, tuple[Any, Any]] = {}

    def propagate(op_strategy: Any, op_schema: Any) -> None:
        if id(op_schema) not in found:
            strided = tuple(spec for spec in op_schema.args_spec if any(isinstance(p, _StridedShard) for p in spec.placements))
            found.clear()
            found[id(op_schema)] = op_schema, SimpleNamespace(args_spec=strided)  # all that it asks of the schema
        original(op_strategy, found[id(op_schema)][1])

    sharding_prop._propagate_use_strided_shard_flag = propagate
    try:
        yield
    finally:
        sharding_prop._propagate_use_strided_shard_flag = original


class _Entered:
    """A context manager that may be entered again and again."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._open: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._open.append(self._make())
        self._open[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)


@contextmanager
def converted_in_place() -> Iterator[None]:
    """Modules give parameters that are plain tensors other data when they convert them, and refuse to where fake ones take part."""
    original = nn.Module._apply

    def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        found: dict[str, Any] = {name: p for name, p in self._parameters.items() if isinstance(p, FakeTensor) or _is_meta(p)}
        for name in found:
            self._parameters[name] = None
        try:
            original(self, fn, recurse)
        finally:
            self._parameters.update(found)
        with torch.no_grad():
            for name, parameter in found.items():
                self._parameters[name] = _converted(parameter, fn)
        return self

    nn.Module._apply = _apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


def _is_meta(parameter: Any) -> bool:
    """Whether it is one of those that were made before a ledger was entered."""
    return type(parameter) is nn.Parameter and parameter.is_meta


def _converted(parameter: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """The same with other data, or, where that leaves the meta device, another."""
    data = fn(parameter)
    if not isinstance(parameter, FakeTensor):
        if not data.is_meta:
            return nn.Parameter(data, parameter.requires_grad)
        with unset_fake_temporarily():
            data = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype, device=data.device)
    parameter.data = data
    if parameter.grad is not None:
        parameter.grad.data = fn(parameter.grad)
    return parameter
