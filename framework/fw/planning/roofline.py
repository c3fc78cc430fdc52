"""How long a step takes at least: each operator at the GPU's peak, or as fast as its memory moves what it reads and writes.

The roofline of Williams et al. 2009 (https://doi.org/10.1145/1498765.1498785), operator by operator, with what a data sheet says
(:mod:`fw.meter.devices`). No kernel reaches a peak, so that a real step takes longer.

What is assumed:

- A collective is a ring, of which each rank sends (n - 1) / n of the bytes, twice for an all-reduce; between hosts the ranks of a group
  that share a host send over the networks of all of them.
- What FSDP and DDP exchange (and what a ring passes on) is under way beside the computation of the same forward or backward, as far as that
  lasts; what layers exchange is waited for.
- Half of the scores of causal attention are not computed.
- A copy between host and GPU is waited for. What the host computes moves as fast as a copy to it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from fw.meter.account import History

_aten = torch.ops.aten
_FREE = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided, _aten._unsafe_view}
_ROWS = {_aten.embedding, _aten.index, _aten.index_select, _aten.gather}
"""Read as much of their first argument as they give back."""
_FORWARDS = {_aten._scaled_dot_product_flash_attention, _aten._scaled_dot_product_cudnn_attention}
_FORWARDS |= {_aten._scaled_dot_product_efficient_attention, _aten._scaled_dot_product_flash_attention_for_cpu}
_BACKWARDS = {_aten._scaled_dot_product_flash_attention_backward, _aten._scaled_dot_product_cudnn_attention_backward}
_BACKWARDS |= {_aten._scaled_dot_product_efficient_attention_backward, _aten._scaled_dot_product_flash_attention_for_cpu_backward}
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_DTYPES |= {torch.float8_e4m3fn: "float8", torch.float8_e5m2: "float8"}
_INSTEAD = {"float8": ("bfloat16", "float16")}
"""What is computed where a GPU has no products of a dtype; float32 in the end."""


class Speeds(Protocol):
    """What bounds an operator: :class:`fw.meter.devices.Device`, or this machine's processors (:mod:`fw.planning.host_speed`).

    Attributes:
        operator_seconds: what each takes beside its work, where nothing else goes on meanwhile.
    """

    @property
    def peak_flops(self) -> Mapping[str, float]: ...
    @property
    def memory_bandwidth(self) -> float: ...
    @property
    def link_bandwidth(self) -> float: ...
    @property
    def network_bandwidth(self) -> float: ...
    @property
    def host_bandwidth(self) -> float: ...
    @property
    def operator_seconds(self) -> float: ...


@dataclass(frozen=True)
class Work:
    """What an operator does, on the GPU (``device``), on the host, or between both (``copy``).

    Attributes:
        dtype: of :data:`fw.meter.devices.DTYPES`, of what it multiplies.
        nbytes: read and written.
    """

    flops: int
    dtype: str
    nbytes: int
    where: Literal["device", "host", "copy"] = "device"


@dataclass(frozen=True)
class Exchange:
    """What a rank sends in a collective.

    Attributes:
        ranks: of the group.
        beside: whether computation goes on meanwhile.
    """

    nbytes: float
    ranks: tuple[int, ...]
    beside: bool


def work(func: Any, args: Any, kwargs: Any, out: Any, is_on_host: Callable[[Tensor], bool]) -> Work | None:
    """Of an operator that has run; None where it moves nothing: a view, memory without values, a collective."""
    packet, schema = func.overloadpacket, func._schema
    if packet in _FREE or func.namespace not in ("aten", "fw") or not (written := _written(schema, args, kwargs, out)):
        return None
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    read = given[1:] + written if packet in _ROWS else given[1:] if packet is _aten.copy_ else given
    nbytes = sum(_nbytes(tensor) for tensor in (*read, *written))
    sides = {is_on_host(tensor) for tensor in (*given, *written) if tensor.dim()}
    dtype = next((_DTYPES[t.dtype] for t in given if t.dtype in _DTYPES), "float32")
    return Work(flops(func, args, kwargs, out), dtype, nbytes, "device" if True not in sides else "host" if sides == {True} else "copy")


def flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Of products, by torch's formulas; half of attention's where it is causal; 0 of all else."""
    packet = func.overloadpacket
    if packet in _FORWARDS or packet in _BACKWARDS:
        first = 1 if packet in _BACKWARDS else 0
        query, key, value = (tuple(x.shape) for x in args[first : first + 3])
        key, value = ((shape[0], query[1], *shape[2:]) for shape in (key, value))  # grouped ones are used by each query head
        counted = sdpa_backward_flop_count(query, query, key, value) if first else sdpa_flop_count(query, key, value)
        return int(counted) // (2 if _argument(func, args, kwargs, "is_causal") else 1)
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def exchange(func: Any, args: Any, out: Any) -> Exchange | None:
    """What a collective sends; None where that is nothing."""
    name = func._schema.name.partition("::")[2]
    group = _group(args)
    sent = next((share for part, share in _SHARES.items() if part in name), None)
    if group is None or sent is None:
        return None
    ranks = tuple(dist.get_process_group_ranks(group))
    given, got = (sum(_nbytes(leaf) for leaf in tree_leaves(values) if isinstance(leaf, Tensor)) for values in (args, out))
    total = max(given, got) if func.namespace == "_c10d_functional" else _whole(name, args)
    factor = sent if name == "send" else sent * (len(ranks) - 1) / len(ranks)
    return Exchange(factor * total, ranks, func.namespace == "c10d")


def step_time(history: History, device: Speeds, ranks_per_host: int, repeated: Sequence[int]) -> float:
    """Seconds of a step at least.

    Args:
        repeated: for each micro-batch of the history, how many of the step are like it.
    """
    stretches: dict[int, list[float]] = {}
    begins = [changes for changes, _ in history.marks]
    for changes, cost in history.costs:
        sums = stretches.setdefault(bisect_right(begins, changes), [0.0, 0.0])
        sums[isinstance(cost, Exchange) and cost.beside] += _seconds(cost, device, ranks_per_host)
    number, total = -1, 0.0
    for stretch in range(len(begins) + 1):
        number += stretch > 0 and history.marks[stretch - 1][1] == "forward"
        last = stretch == len(begins)  # after the last mark it is the update
        total += max(stretches.get(stretch, [0.0, 0.0])) * (1 if last or number < 0 else repeated[number])
    return total


def _seconds(cost: Work | Exchange, device: Speeds, ranks_per_host: int) -> float:
    if isinstance(cost, Exchange):
        hosts = [rank // ranks_per_host for rank in cost.ranks]
        side_by_side = max(hosts.count(host) for host in set(hosts))
        speed = device.link_bandwidth
        if len(set(hosts)) > 1:
            speed = min(speed, side_by_side * device.network_bandwidth) if side_by_side > 1 else device.network_bandwidth
        return cost.nbytes / speed
    if cost.where != "device":
        return cost.nbytes / device.host_bandwidth
    return device.operator_seconds + max(cost.flops / peak(device, cost.dtype), cost.nbytes / device.memory_bandwidth)


def peak(device: Speeds, dtype: str) -> float:
    """FLOP/s of products in a dtype: where the GPU has none, of those computed instead. float32 is without TF32, as torch has it."""
    peaks: Mapping[str, float] = device.peak_flops
    return next(peaks[name] for name in (dtype, *_INSTEAD.get(dtype, ()), "float32") if name in peaks)


_SHARES = {"allgather": 1, "all_gather": 1, "reduce_scatter": 1, "allreduce": 2, "all_reduce": 2, "alltoall": 1, "all_to_all": 1, "send": 1}
"""By a part of a collective's name, how often a ring sends the bytes of the whole."""


def _whole(name: str, args: Any) -> int:
    """Bytes of the largest of c10d's arguments: of what is gathered, or of what is scattered."""
    tensors = [[leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)] for value in args]
    return max((sum(_nbytes(t) for t in each) for each in tensors), default=0)


def _group(args: Any) -> dist.ProcessGroup | None:
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value)
            except RuntimeError:  # another class, such as what is computed
                continue
    names = [value for value in args if isinstance(value, str)]
    return dist.distributed_c10d._resolve_process_group(names[-1]) if names else None  # type: ignore[attr-defined,arg-type]


def _written(schema: Any, args: Any, kwargs: Any, out: Any) -> list[Tensor]:
    """The tensors whose values an operator makes or changes."""
    if schema.is_mutable:
        values = [
            args[place] if place < len(args) else kwargs.get(argument.name)
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    if any(result.alias_info is not None for result in schema.returns):
        return []
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]


def _argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[place] if place < len(args) else kwargs.get(name, argument.default_value)
    return None


def _nbytes(tensor: Tensor) -> int:
    """What is touched of it: no more than there is, where it is expanded."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
