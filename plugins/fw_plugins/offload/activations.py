"""What forward saves for backward, kept in host memory or on disk in the meantime."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from fw.config import format_size
from fw.errors import RunError
from fw.kinds.model import CausalLM
from fw.kinds.offload import OffloadPolicy


def attach(model: CausalLM, policy: OffloadPolicy, least_bytes: int) -> None:
    """Offload what the blocks save, in tensors of ``least_bytes`` or more; parameters and what shares their memory stay."""
    store = _DiskStore(policy.path) if policy.activations == "nvme" and policy.path is not None else _host_copy
    for block in model.blocks:
        block.forward = _offloading(block, block.forward, store, least_bytes)


@dataclass(frozen=True)
class _Away:
    """A tensor that is not here: ``fetch`` brings its values back, laid out as they were stored."""

    fetch: Callable[[torch.device], Tensor]
    device: torch.device


def _offloading(block: nn.Module, forward: Callable[..., Any], store: Callable[[Tensor], Any], least_bytes: int) -> Callable[..., Any]:
    def offloading(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        parameters = {_storage(p) for p in block.parameters()}
        # A tensor that several operations save is stored once. Its storage is known by a weak reference: an address may be used again.
        stored: dict[Any, tuple[StorageWeakRef, _Away]] = {}

        def pack(tensor: Tensor) -> Tensor | _Away:
            small, repeated = tensor.nbytes < least_bytes, 0 in tensor.stride()
            if small or repeated or type(tensor) is not Tensor or _storage(tensor) in parameters:
                return tensor
            key = (_storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
            if key in stored and not stored[key][0].expired():
                return stored[key][1]
            away = _Away(store(tensor.detach()), tensor.device)
            stored[key] = StorageWeakRef(tensor.untyped_storage()), away
            return away

        def unpack(packed: Tensor | _Away) -> Tensor:
            return packed.fetch(packed.device) if isinstance(packed, _Away) else packed

        # Where forward is compiled from inside, the hooks are not to be.
        with saved_tensors_hooks(torch.compiler.disable(pack), torch.compiler.disable(unpack)):
            return forward(*args, **kwargs)

    # The hooks are set outside what is compiled; inside, they see what the compiled forward saves.
    outside: Callable[..., Any] = torch.compiler.disable(offloading, recursive=False)
    return outside


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _host_copy(tensor: Tensor) -> Callable[[torch.device], Tensor]:
    """In page-locked memory, copied in the order of the device's stream; what is on the host already stays."""
    if tensor.device.type == "cpu":
        return lambda device: tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    stride = tensor.stride()

    def fetch(device: torch.device) -> Tensor:
        back = torch.empty_strided(host.shape, stride, dtype=host.dtype, device=device)  # compiled code counts on it, gaps included
        return back.copy_(host, non_blocking=True)

    return fetch


class _DiskStore:
    """Files without a name: their space comes back when nothing refers to them any more, or the process ends."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def __call__(self, tensor: Tensor) -> Callable[[torch.device], Tensor]:
        try:
            file = _File(self._directory, tensor)
        except OSError as error:
            free = format_size(shutil.disk_usage(self._directory).free)
            raise RunError(f"offload.path: {self._directory}: {error.strerror} while storing activations; {free} are free") from None
        return lambda device: file.read().to(device)


class _File:
    def __init__(self, directory: Path, tensor: Tensor) -> None:
        self._shape, self._dtype, self._bytes = tensor.shape, tensor.dtype, tensor.nbytes
        self._stride = tensor.stride()  # compiled code counts on it, gaps included
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - closed when nothing refers to it any more
        os.posix_fallocate(self._file.fileno(), 0, self._bytes)  # a full disk is an error here and not a signal later
        with mmap.mmap(self._file.fileno(), self._bytes) as memory:
            torch.frombuffer(memory, dtype=self._dtype).view(self._shape).copy_(tensor)

    def read(self) -> Tensor:
        """The values, in memory of their own, laid out as they were."""
        data = bytearray(self._bytes)
        os.preadv(self._file.fileno(), [data], 0)
        values = torch.frombuffer(data, dtype=self._dtype).view(self._shape)
        if values.stride() == self._stride:
            return values
        return torch.empty_strided(self._shape, self._stride, dtype=self._dtype).copy_(values)
