"""What forward saves for backward, kept in host memory or on disk in the meantime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from fw.api import CausalLM, OffloadPolicy, planned_gpu, repeats
from fw_plugins.offload.disk_store import DiskStore
from fw_plugins.offload.host_store import HostStore
from fw_plugins.offload.prefetch import Parcel, Prefetcher, Stored

Store = Callable[[Tensor], Stored | None]
"""Puts a tensor's values elsewhere; None where they stay."""


def attach(model: CausalLM, policy: OffloadPolicy, least_bytes: int, ahead: int) -> None:
    """Offload what the blocks save, in tensors of ``least_bytes`` or more; parameters and what shares their memory stay.

    Args:
        ahead: blocks whose tensors are brought back before backward comes to them.
    """
    store: Store = DiskStore(policy.path) if policy.activations == "nvme" and policy.path is not None else HostStore()
    offload(model.blocks, store, least_bytes, ahead)


def offload(blocks: Any, store: Store, least_bytes: int, ahead: int) -> None:
    """The same for blocks in the order in which a model calls them."""
    prefetcher = Prefetcher(ahead)
    for number, block in enumerate(blocks):
        block.forward = _offloading(number, block, block.forward, store, prefetcher, least_bytes)


def _offloading(
    number: int, block: nn.Module, forward: Callable[..., Any], store: Store, prefetcher: Prefetcher, least_bytes: int
) -> Callable[..., Any]:
    begin = torch.compiler.disable(prefetcher.visit)

    def offloading(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or repeats():
            return forward(*args, **kwargs)
        visit = begin(number)
        parameters = {_storage(p) for p in block.parameters()}
        # A tensor that several operations save is stored once. Its storage is known by a weak reference: an address may be used again.
        parcels: dict[Any, tuple[StorageWeakRef, Parcel]] = {}

        def pack(tensor: Tensor) -> Tensor | Parcel:
            small, repeated = tensor.nbytes < least_bytes, 0 in tensor.stride()
            if small or repeated or not _is_plain(tensor) or _storage(tensor) in parameters:
                return _kept(tensor)
            key = (_storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
            if key in parcels and not parcels[key][0].expired():
                parcel = parcels[key][1]
                parcel.uses += 1
                return parcel
            if (stored := store(tensor.detach())) is None:
                return _kept(tensor)
            parcel = visit.add(stored)
            parcels[key] = StorageWeakRef(tensor.untyped_storage()), parcel
            return parcel

        def unpack(packed: Tensor | Parcel) -> Tensor:
            return prefetcher.take(packed) if isinstance(packed, Parcel) else packed

        # Where forward is compiled from inside, the hooks are not to be.
        with saved_tensors_hooks(torch.compiler.disable(pack), torch.compiler.disable(unpack)):
            return forward(*args, **kwargs)

    # The hooks are set outside what is compiled; inside, they see what the compiled forward saves.
    outside: Callable[..., Any] = torch.compiler.disable(offloading, recursive=False)
    return outside


def _kept(tensor: Tensor) -> Tensor:
    """What a hook returns of a tensor that stays. An operation's own output would keep the operation, which keeps it; autograd knows whose
    it is without that."""
    return tensor if tensor.is_leaf else tensor.detach()


def _is_plain(tensor: Tensor) -> bool:
    """Not of a class with rules of its own. In a plan for a GPU tensors have no bytes, and lie where they would."""
    return type(tensor) is Tensor or (planned_gpu() is not None and type(tensor) is FakeTensor)


def _storage(tensor: Tensor) -> int:
    """Of a DTensor the one of its local tensor, which is what operators save."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()._cdata
