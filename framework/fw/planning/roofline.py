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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fw.meter.account import History
from fw.meter.operator_flops import operator_flops
from fw.meter.speeds import Speeds, peak
from fw.planning.leaves import tensors

_aten = torch.ops.aten
_FREE = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided, _aten._unsafe_view}
_NO_WORK = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "prim", "profiler"}
"""Namespaces of collectives, which :func:`exchange` counts, and of marks."""
_ROWS = {_aten.embedding, _aten.index, _aten.index_select, _aten.gather}
"""Read as much of their first argument as they give back."""
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_DTYPES |= {torch.float8_e4m3fn: "float8", torch.float8_e5m2: "float8"}


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
    if packet in _FREE or func.namespace in _NO_WORK or not (written := _written(schema, args, kwargs, out)):
        return None
    given = tensors((args, kwargs))
    read = given[1:] + written if packet in _ROWS else given[1:] if packet is _aten.copy_ else given
    nbytes = sum(_nbytes(tensor) for tensor in (*read, *written))
    sides = {is_on_host(tensor) for tensor in (*given, *written) if tensor.dim()}
    dtype = next((_DTYPES[t.dtype] for t in given if t.dtype in _DTYPES), "float32")
    return Work(
        operator_flops(func, args, kwargs, out), dtype, nbytes, "device" if True not in sides else "host" if sides == {True} else "copy"
    )


def exchange(func: Any, args: Any, out: Any) -> Exchange | None:
    """What a collective sends; None where that is nothing."""
    name = func._schema.name.partition("::")[2]
    group = _group(args)
    sent = next((share for part, share in _SHARES.items() if part in name), None)
    if group is None or sent is None:
        return None
    ranks = tuple(dist.get_process_group_ranks(group))
    given, got = (sum(map(_nbytes, tensors(values))) for values in (args, out))
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


_SHARES = {"allgather": 1, "all_gather": 1, "reduce_scatter": 1, "allreduce": 2, "all_reduce": 2, "alltoall": 1, "all_to_all": 1, "send": 1}
"""By a part of a collective's name, how often a ring sends the bytes of the whole."""


def _whole(name: str, args: Any) -> int:
    """Bytes of the largest of c10d's arguments: of what is gathered, or of what is scattered."""
    return max((sum(map(_nbytes, tensors(value))) for value in args), default=0)


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
        return tensors(values)
    if any(result.alias_info is not None for result in schema.returns):
        return []
    return tensors(out)


def _nbytes(tensor: Tensor) -> int:
    """What is touched of it: no more than there is, where it is expanded."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
