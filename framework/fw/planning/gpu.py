"""What a GPU does otherwise than the CPU that a plan's fake tensors are on: rules of the backend, never of a model."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as torch_optimizer

from fw.meter.account import UNNAMED, Block, History
from fw.meter.devices import Device
from fw.meter.step_memory import OTHER
from fw.planned import PlannedGPU, planning_for
from fw.planning.cuda_attention import attention_as_on, scratch_bytes
from fw.planning.cuda_autocast import autocast_as_on_gpu
from fw.planning.cuda_sorting import sort_scratch_bytes
from fw.planning.leaves import tensors
from fw.planning.roofline import exchange, work

_aten = torch.ops.aten
RECORDINGS = -1
"""The stream of blocks in the memory of CUDA graphs, which is theirs alone."""
_PRODUCTS = {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten._scaled_mm, _aten.linear, _aten.matmul}
"""Computed by cuBLAS; the last two are seen in inference mode, where nothing is made of others."""


class Gpu:
    """Knows which tensors would be in host memory, and what is allocated and done beside what operators return.

    Args:
        came, went: are told of memory that is no tensor's, by a number that is no address.
    """

    def __init__(self, device: Device, came: Callable[[int, Block], None], went: Callable[[int], None]) -> None:
        self._device, self._came, self._went = device, came, went
        self._numbers = itertools.count(-1, -1)
        self._threads: set[tuple[bool, bool]] = set()
        """Whether those that have used cuBLAS are autograd's own, and recorded it."""
        self._records = False
        self._on_host: set[int] = set()
        """Addresses of storage objects."""
        self._to_host = self._all_to_host = self._pinned = False
        self._streams = {torch.cpu.current_stream(): 0}
        self._history: History | None = None
        self.groups: set[tuple[int, ...]] = set()
        """Ranks that have exchanged something."""
        self.host_bytes = self.host_peak_bytes = self.left_out_bytes = 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within it, plugins and torch choose as on the GPU."""
        capability = self._device.compute_capability
        with ExitStack() as stack:
            gpu = PlannedGPU(self._device.name, capability, self.is_on_host, self._emptied, self._recording, self.on_host)
            stack.enter_context(planning_for(gpu))
            stack.enter_context(attention_as_on(capability))
            stack.enter_context(autocast_as_on_gpu())
            stack.enter_context(_foreach())
            yield

    @contextmanager
    def recording(self, history: History) -> Iterator[None]:
        """What operators cost goes there. What blocks that it leaves out would keep in host memory is added to its peak."""
        self._history = history
        before, self.host_peak_bytes = self.host_peak_bytes, self.host_bytes
        try:
            yield
        finally:
            self._history = None
            self.host_peak_bytes = max(before, self.host_peak_bytes + self.left_out_bytes)
            self.left_out_bytes = 0

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """All that is made within it is made in host memory."""
        before, self._all_to_host = self._all_to_host, True
        try:
            yield
        finally:
            self._all_to_host = before

    @property
    def stream(self) -> int:
        """The one that is used now. FSDP uses the CPU's, which torch has for code that runs on any device, as it would use a GPU's."""
        if self._records:
            return RECORDINGS
        return self._streams.setdefault(torch.cpu.current_stream(), len(self._streams))

    def _emptied(self) -> None:
        if self._history is not None:
            self._history.emptied.append(len(self._history.changes))

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """A CUDA graph is recorded on a stream of its own, with a workspace for cuBLAS there; ``torch.cuda.graph`` empties the cache."""
        self._emptied()
        self._records = True
        try:
            yield
        finally:
            self._records = False

    def is_on_host(self, tensor: Tensor) -> bool:
        """Whether it would be; of a DTensor, this rank's part."""
        plain = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        return plain.untyped_storage()._cdata in self._on_host

    def placed(self, args: Any, kwargs: Any) -> Any:
        """Arguments of an operator about to run, of which is known from here on where its results lie: in host memory where that is
        page-locked, or where all that it computes with is there."""
        kwargs = dict(kwargs)
        sources = [tensor for tensor in tensors((args, kwargs)) if tensor.dim()]
        computed = bool(sources) and all(self.is_on_host(source) for source in sources)
        self._pinned = bool(kwargs.pop("pin_memory", False))
        self._to_host = self._pinned or self._all_to_host or computed
        return kwargs

    def takes(self, storage: torch.UntypedStorage) -> bool:
        """Whether what the operator has made is in host memory."""
        key = storage._cdata
        if key in self._on_host:
            return True
        if not self._to_host:
            return False
        self._on_host.add(key)
        nbytes = storage.nbytes()
        if self._pinned and nbytes:  # torch rounds up (CachingHostAllocatorImpl::allocate of ATen/core/CachingHostAllocator.h)
            nbytes = 1 << (nbytes - 1).bit_length()
        self.host_bytes += nbytes
        self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)
        weakref.finalize(storage, self._left_host, key, nbytes).atexit = False
        return True

    def mapped(self, tensor: Tensor) -> None:
        """It lies in a file that is mapped, which takes nothing of the host's memory."""
        storage = tensor.untyped_storage()
        self._on_host.add(storage._cdata)
        weakref.finalize(storage, self._on_host.discard, storage._cdata).atexit = False

    def _left_host(self, key: int, nbytes: int) -> None:
        self._on_host.discard(key)
        self.host_bytes -= nbytes

    def ran(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operator has run: what it took besides its results, and what it cost."""
        if func.overloadpacket in _PRODUCTS and not self._to_host:
            self._use_cublas()
        taken = {next(self._numbers): self._beside(nbytes) for nbytes in [*scratch_bytes(func, args), *sort_scratch_bytes(func, args)]}
        for number, block in taken.items():
            self._came(number, block)
        for number in taken:
            self._went(number)
        if self._history is not None and (cost := work(func, args, kwargs, out, self.is_on_host)) is not None:
            self._history.costs.append((len(self._history.changes), cost))

    def _use_cublas(self) -> None:
        """torch allocates a workspace for each handle and stream, and each thread has a handle: forward's, and autograd's for the device
        (``getCurrentCUDABlasHandle`` of aten/src/ATen/cuda/CublasHandlePool.cpp)."""
        where = torch._C._current_graph_task_id() != -1, self._records
        if where not in self._threads:
            self._threads.add(where)
            self._came(next(self._numbers), self._beside(self._device.cublas_workspace_bytes, OTHER))

    def _beside(self, nbytes: int, category: str = UNNAMED) -> Block:
        """What is no tensor's."""
        return Block(nbytes, category, stream=RECORDINGS if self._records else 0)

    def exchanged(self, func: Any, args: Any, out: Any) -> None:
        """A collective has been called."""
        if (cost := exchange(func, args, out)) is None:
            return
        self.groups.add(cost.ranks)
        if self._history is not None:
            self._history.costs.append((len(self._history.changes), cost))


@contextmanager
def _foreach() -> Iterator[None]:
    """torch's optimizers take lists of tensors at a time where nobody says, but on GPUs only, and only of types that they know."""
    module: Any = torch_optimizer
    original, known = module._get_foreach_kernels_supported_devices, module._foreach_supported_types
    module._get_foreach_kernels_supported_devices = lambda: [*original(), "cpu"]
    known.append(FakeTensor)
    try:
        yield
    finally:
        module._get_foreach_kernels_supported_devices = original
        known.remove(FakeTensor)
