"""Copies between page-locked host memory and a GPU, beside what is computed there."""

from __future__ import annotations

import mmap
import warnings
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from fw.planned import planned_gpu


class Copy:
    """A copy under way on a stream of its own, whose order the allocator does not know."""

    def __init__(self, done: torch.cuda.Event, compute: torch.cuda.Stream) -> None:
        self._done, self._compute = done, compute

    def wait(self) -> None:
        """What is computed from here on comes after it; the host does not wait."""
        self._compute.wait_event(self._done)

    def done(self) -> None:
        """The host waits for it."""
        self._done.synchronize()


class DoneCopy(Copy):
    """One of a device without streams, or of a plan."""

    def __init__(self) -> None:
        pass

    def wait(self) -> None:
        """Nothing is under way."""

    def done(self) -> None:
        """It is."""


Moment = tuple[torch.cuda.Event, torch.cuda.Stream]
"""Of the stream that computes; what was given to it by then, and nothing later."""


class Lane:
    """Copies in one direction, one after another, beside the stream that computes."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def now(self) -> Moment | None:
        """This moment of the stream that computes; None where there is none."""
        if self._stream is None:
            return None
        compute = torch.cuda.current_stream(self._stream.device)
        return compute.record_event(), compute

    def keeps(self, tensor: Tensor) -> None:
        """The tensor's memory is nobody else's before copies that are under way when it goes are done."""
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def copy(self, target: Tensor, source: Tensor, after: Moment | None = None) -> Copy:
        """Fill ``target`` once ``source`` is computed, and once nothing that was computed before uses the memory of ``target``.

        Both must live until something waits for the copy: the allocator knows them as tensors of the computing stream.

        Args:
            after: what counts as computed before; None for all that is by now, by the calling thread's stream.
        """
        if self._stream is None:
            target.copy_(source)
            return DoneCopy()
        event, compute = after or (None, torch.cuda.current_stream(self._stream.device))
        if event is None:
            self._stream.wait_stream(compute)
        else:
            self._stream.wait_event(event)
        # Without the first, leaving the second would make a context of whatever device was the thread's.
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return Copy(self._stream.record_event(), compute)


def host_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uninitialised memory of the host, page-locked where there is a GPU, and to the byte: torch rounds its own up to a power of two."""
    if (gpu := planned_gpu()) is not None:
        with gpu.on_host():
            return torch.empty(shape, dtype=dtype)
    empty = torch.empty(shape, dtype=dtype, device="meta")
    nbytes = empty.nbytes
    if not nbytes or not torch.cuda.is_available():
        return torch.empty(shape, dtype=dtype, device="cpu")
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_DONTFORK"):
        memory.madvise(mmap.MADV_DONTFORK)  # else each process that reads data would be given a copy of what is locked
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    address = tensor.data_ptr()
    if (error := int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))) == 0:
        # The finalizer keeps the memory mapped until it is no longer locked.
        weakref.finalize(tensor.untyped_storage(), _unlock, memory, address).atexit = False
    else:
        with suppress(RuntimeError):  # the error is told once more, to whatever is computed next
            torch.empty(1, device="cuda").add_(1)
        warnings.warn(
            f"{nbytes:,} bytes of host memory cannot be page-locked (CUDA error {error}); copies wait for each other", stacklevel=2
        )
    return tensor.view(dtype).view(shape)


def _unlock(memory: mmap.mmap, address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
