"""What a block's forward computes, operator by operator: bytes of the results, and what it costs to have them again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fw.api import on_gpu, operator_flops
from fw_plugins.activation.storages import overwritten, storage, storages

FLOPS_PER_BYTE = {"cpu": 10.0, "cuda": 200.0}
"""What a device computes in the time in which it moves a byte, roughly: 200 GFLOP/s and 20 GB/s of two cores, 990 TFLOP/s in bf16 and
3.4 TB/s of an H100 (its data sheet), both rounded."""


@dataclass(frozen=True)
class Operation:
    """A call of an operator.

    Attributes:
        key: the operator's name, and the number of its call in the block from 0.
        kept_bytes: of its results, where they have memory of their own.
        cost: FLOPs, or bytes moved times :data:`FLOPS_PER_BYTE` where that is more.
    """

    key: tuple[str, int]
    kept_bytes: int
    cost: float


@dataclass(frozen=True)
class BlockProfile:
    """A block's forward.

    Attributes:
        input_bytes: of its inputs that have a gradient: what stays where the block is recomputed.
        saved_bytes: what stays where it is not, inputs included.
        operations: those a repetition executes, which ends with the last tensor that backward needs.
    """

    input_bytes: int
    saved_bytes: int
    operations: tuple[Operation, ...]

    @property
    def cost(self) -> float:
        """Of repeating all of it."""
        return sum(operation.cost for operation in self.operations)


def profile(forward: Callable[..., Any], parameters: Iterable[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BlockProfile:
    """Run ``forward`` once, with gradients, and forget its result. Random numbers are as if it had not run."""
    tensors = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
    given = {storage(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    inputs = storages([tensor for tensor in tensors if tensor.requires_grad])
    present = {*given, *storages(list(parameters))}
    recorder = _Recorder(FLOPS_PER_BYTE["cuda" if on_gpu(tensors[0]) else "cpu"])
    saved: dict[int, Tensor] = {}
    needed = 0

    def pack(tensor: Tensor) -> None:  # no backward follows, and a result that its own graph holds would never be freed
        nonlocal needed
        needed = len(recorder.operations)
        if storage(tensor) not in present:
            saved[storage(tensor)] = tensor.detach()  # held, so that no other gets its address

    devices = sorted({tensor.device.index for tensor in tensors if tensor.is_cuda})
    with torch.random.fork_rng(devices), saved_tensors_hooks(pack, lambda nothing: nothing), recorder:
        forward(*args, **kwargs)
    input_bytes = sum(given[name] for name in inputs)
    saved_bytes = input_bytes + sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    return BlockProfile(input_bytes, saved_bytes, tuple(recorder.operations[:needed]))


class _Recorder(TorchDispatchMode):
    def __init__(self, flops_per_byte: float) -> None:
        super().__init__()
        self._flops_per_byte = flops_per_byte
        self._calls: dict[str, int] = defaultdict(int)
        self._maker: dict[int, int] = {}
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = op(*args, **kwargs)
        name = str(op.overloadpacket)
        number = self._calls[name]
        self._calls[name] += 1
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        before = storages(given)
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and storage(leaf) not in before]
        new_bytes = sum(tensor.untyped_storage().nbytes() for tensor in made)
        overwrites = op._schema.is_mutable
        moves = sum(tensor.nbytes for tensor in given) + new_bytes if made or overwrites else 0  # a view moves nothing
        cost = max(float(_flops(op, args, kwargs, out)), moves * self._flops_per_byte)
        if overwrites:  # a result that is overwritten later is not kept
            for index in {self._maker[written] for written in overwritten(op, args, kwargs) & self._maker.keys()}:
                self.operations[index] = replace(self.operations[index], kept_bytes=0)
        self._maker.update(dict.fromkeys(map(storage, made), len(self.operations)))
        self.operations.append(Operation((name, number), 0 if overwrites else new_bytes, cost))
        return out


def _flops(op: Any, args: Any, kwargs: Any, out: Any) -> int:
    packet = op.overloadpacket
    if str(packet) == "flash_attn._flash_attn_forward":
        q_BLNH, k_BLKH = args[:2]
        return 4 * q_BLNH.numel() * k_BLKH.shape[1]
    if str(packet) == "flash_attn._flash_attn_varlen_forward":
        q_TNH, longest = args[0], args[6]
        return int(4 * q_TNH.numel() * longest)  # as if all documents were as long as the longest
    return operator_flops(op, args, kwargs, out)
