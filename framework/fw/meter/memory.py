"""Memory of this process."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

_HOST = torch.device("cpu")


def peak_memory_bytes(device: torch.device) -> int:
    """CUDA: the most the caching allocator had allocated. CPU: the largest resident set of the process so far (getrusage)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024


def forget_peak() -> None:
    """From now on the peak of the resident set is that of what follows, where the kernel can do that (Linux)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


class HostPeak:
    """The largest resident set of this process, without what measuring takes: events of a profiler, by the hundred thousand."""

    def __init__(self) -> None:
        self._before = self._metered = 0
        self._stepped = False

    @contextmanager
    def metering(self) -> Iterator[None]:
        """Something is measured inside; whoever does has given back what that took when the context ends."""
        self._before = max(self._before, peak_memory_bytes(_HOST))
        forget_peak()
        yield
        self._metered = max(self._metered, peak_memory_bytes(_HOST))
        forget_peak()

    def stepped(self) -> None:
        """A step was made outside."""
        self._stepped = True

    def bytes(self) -> int:
        """So far; what was measured counts as long as no step was made outside."""
        return max(self._before, peak_memory_bytes(_HOST), 0 if self._stepped else self._metered)


def anonymous_bytes() -> int:
    """What this process holds of its own: its resident set without mapped files, which the system may drop (Linux); elsewhere all of it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return held_bytes(_HOST) or 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


class OwnPeak:
    """Within it, the most this process holds of its own beside what it held before, looked at often: of a GPU by its allocator, of the
    host :func:`anonymous_bytes`."""

    _EVERY = 0.01

    def __init__(self, device: torch.device) -> None:
        self._device, self._ended = device, threading.Event()
        self._before = self._most = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def bytes(self) -> int:
        """So far."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._before
        return self._most - self._before

    def _watch(self) -> None:
        while not self._ended.wait(self._EVERY):
            self._most = max(self._most, anonymous_bytes())

    def __enter__(self) -> OwnPeak:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        else:
            self._before = self._most = anonymous_bytes()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()


def take_workspaces(device: torch.device) -> None:
    """On a GPU, have cuBLAS take its workspaces, one for each thread that computes products (autograd's, too), which stay: a step that is
    measured then takes what every step does."""
    if device.type == "cuda":
        one = torch.ones(1, 1, device=device, requires_grad=True)
        (one @ one).sum().backward()


def levels(device: torch.device) -> dict[str, int]:
    """What is held now: of the host (Linux), and of a GPU what the caching allocator has reserved and the driver given out to all."""
    found = {"host": held} if (held := held_bytes(_HOST)) is not None else {}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        found |= {"allocated": torch.cuda.memory_allocated(device), "reserved": torch.cuda.memory_reserved(device), "driver": total - free}
    return found


def held_bytes(device: torch.device) -> int | None:
    """What this process holds now, in use or not. CUDA: what the caching allocator has reserved. CPU: the resident set (Linux), None where
    the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    if sys.platform != "linux":
        return None
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def malloc_in_use_bytes() -> int | None:
    """Bytes that glibc's malloc has given out and not got back, those in mappings of their own included; None with another C library.

    Tensors on the CPU are among them. Unlike resident memory it knows nothing of freed pages that are kept, nor of files.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return None
    libc.mallinfo2.restype = _Mallinfo2
    found = libc.mallinfo2()
    return int(found.uordblks + found.hblkhd)


class _Mallinfo2(ctypes.Structure):
    """Of glibc's malloc.h (2.33 and later)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


def available_bytes(device: torch.device) -> int:
    """What could be allocated now: free memory of a GPU; on the host, what the kernel can make free, within the container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    bounds = []
    with suppress(OSError, ValueError, IndexError):
        line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
        bounds.append(int(line.split()[1]) * 1024)
    for group in _GROUPS:
        if (left := group.left()) is not None:
            bounds.append(left)
    return max(0, min(bounds)) if bounds else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def host_memory() -> int:
    """Bytes that this machine has, or that the container this process is in may take of them."""
    limits = [most for group in _GROUPS if (most := group.most()) is not None]
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *limits])


@dataclass(frozen=True)
class ControlGroup:
    """Of processes whose memory has a limit: what a container is.

    Attributes:
        limit, used: files in ``place`` with a number of bytes each.
        kept: lines of ``memory.stat`` there, of what counts as used, and is given back when it is wanted: files that were read.
    """

    place: Path
    limit: str
    used: str
    kept: tuple[str, ...]

    def most(self) -> int | None:
        """Bytes of its limit; None where there is none."""
        try:
            return int((self.place / self.limit).read_text())
        except (OSError, ValueError):  # no such file, or "max"
            return None

    def left(self) -> int | None:
        """Bytes until its limit; None where there is none."""
        try:
            left = int((self.place / self.limit).read_text()) - int((self.place / self.used).read_text())
        except (OSError, ValueError):
            return None
        with suppress(OSError, ValueError):
            stat = dict(line.split() for line in (self.place / "memory.stat").read_text().splitlines())
            left += sum(int(stat.get(name, 0)) for name in self.kept)
        return left


_GROUPS = (
    ControlGroup(Path("/sys/fs/cgroup"), "memory.max", "memory.current", ("active_file", "inactive_file", "slab_reclaimable")),
    ControlGroup(
        Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")
    ),
)
"""As they see themselves from inside, in the versions 2 and 1 of cgroups."""
