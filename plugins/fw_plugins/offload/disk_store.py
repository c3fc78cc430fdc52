"""Tensors in files, read back by a thread."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fw.api import FROM_DISK, TO_DISK, FwError, RunError, allow_open_files, describe, disk_transfer, format_size, planned_gpu
from fw_plugins.offload.prefetch import Fetch, Stored


class DiskStore:
    """Files without a name: their space comes back when nothing refers to them any more, or the process ends."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._reader = Reader()
        directory.mkdir(parents=True, exist_ok=True)
        allow_open_files()

    def __call__(self, tensor: Tensor) -> Stored | None:
        """The values in a file; None in a plan, which writes none.

        Raises:
            RunError: the disk is full, or cannot be written to.
        """
        if planned_gpu() is not None:
            return None
        try:
            return OnDisk(self._directory, tensor, self._reader)
        except OSError as error:
            free = format_size(shutil.disk_usage(self._directory).free)
            raise RunError(f"offload.path: {self._directory}: {error.strerror} while storing activations; {free} are free") from None


class OnDisk(Stored):
    """A file."""

    def __init__(self, directory: Path, tensor: Tensor, reader: Reader) -> None:
        self._directory, self._reader, self._device = directory, reader, tensor.device
        self._shape, self._dtype, self._bytes = tensor.shape, tensor.dtype, tensor.nbytes
        self._stride = tensor.stride()  # compiled code counts on it, gaps included
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - closed when nothing refers to it any more
        os.posix_fallocate(self._file.fileno(), 0, self._bytes)  # a full disk is an error here and not a signal later
        with disk_transfer(TO_DISK, self._bytes, directory), mmap.mmap(self._file.fileno(), self._bytes) as memory:
            torch.frombuffer(memory, dtype=self._dtype).view(self._shape).copy_(tensor)

    def fetch(self) -> Fetch:
        """Have the reader read it."""
        data = torch.empty(self._bytes, dtype=torch.uint8)  # by this thread: torch's profiler does not see what others allocate
        return self._reader.begin(partial(self._read, data), partial(self._values, data))

    def _read(self, data: Tensor) -> None:
        try:
            with disk_transfer(FROM_DISK, self._bytes, self._directory):
                read_whole(self._file.fileno(), data.numpy().data)
        except OSError as error:
            raise RunError(f"offload.path: {self._directory}: {error.strerror or error} while reading activations back") from None

    def _values(self, data: Tensor) -> Tensor:
        """Laid out as they were."""
        values = data.view(self._dtype).view(self._shape)
        if values.stride() != self._stride:
            values = torch.empty_strided(self._shape, self._stride, dtype=self._dtype).copy_(values)
        return values.to(self._device)


def read_whole(descriptor: int, into: memoryview) -> None:
    """Fill ``into`` from a file's beginning; one call of the kernel gives 2 GiB at most.

    Raises:
        OSError: the file cannot be read, or is shorter.
    """
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], done)
        if count == 0:
            raise OSError(f"a file ends after {done} of {len(into)} bytes")
        done += count


class Reader:
    """Reads one after another, in a thread that lives while there is something to read."""

    def __init__(self) -> None:
        self._waiting: deque[Reading] = deque()
        self._lock = threading.Lock()
        self._running = False

    def begin(self, read: Callable[[], None], values: Callable[[], Tensor]) -> Reading:
        """Have ``read`` called, after what was begun before; ``values`` then gives the result to who asks for it."""
        reading = Reading(self, read, values)
        with self._lock:
            self._waiting.append(reading)
            starts, self._running = not self._running, True
        if starts:
            threading.Thread(target=self._run, name="fw activations").start()
        return reading

    def withdraw(self, reading: Reading) -> bool:
        """Take back what was begun; False where the thread is at it, or has been."""
        with self._lock:
            if reading not in self._waiting:
                return False
            self._waiting.remove(reading)
            return True

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running = False
                    return
                reading = self._waiting.popleft()
            reading.run()
            del reading  # it may be the last that refers to a file, and the next one may not come for long


class Reading(Fetch):
    """A file being read."""

    def __init__(self, reader: Reader, read: Callable[[], None], values: Callable[[], Tensor]) -> None:
        self._reader, self._read = reader, read
        self._done = threading.Event()
        self._values: Tensor | Callable[[], Tensor] = values
        self._error: BaseException | None = None

    def run(self) -> None:
        """Read; an error is for who asks for the result."""
        try:
            self._read()
        except BaseException as error:
            self._error = error
        self._done.set()

    def result(self) -> Tensor:
        """What the thread has not begun, who asks for it reads."""
        if self._reader.withdraw(self):
            self.run()
        self._done.wait()
        if isinstance(self._error, FwError):
            raise self._error
        if self._error is not None:
            raise RunError(f"activations could not be read back: {describe(self._error)}") from self._error
        if not isinstance(self._values, Tensor):
            self._values = self._values()
        return self._values

    def cancel(self) -> None:
        """Nothing is read that has not been begun."""
        self._reader.withdraw(self)
