"""Processors of this host that this process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables that have OpenMP bind threads, the one that asks for work included: what it may use is then not what the process may."""
_MOUNT = Path("/sys/fs/cgroup")


def cores() -> frozenset[int]:
    """Their numbers, as the system's affinity has them; where the system does not say, as many as there are."""
    if not hasattr(os, "sched_getaffinity"):
        return frozenset(range(os.cpu_count() or 1))
    if not openmp_binds():
        return frozenset(os.sched_getaffinity(0))
    return _AT_FIRST.union(*_of_threads())


def openmp_binds() -> bool:
    """Whether OpenMP is told to keep its threads on processors."""
    return any(os.environ.get(name, "").lower() not in ("", "false", "disabled") for name in _BINDING)


def quota(mount: Path = _MOUNT, own: Path = Path("/proc/self/cgroup")) -> float | None:
    """How many processors' time the process's control groups let it have (cpu.max, or cpu.cfs_quota_us); None for all."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        inside = PurePosixPath(path.lstrip("/"))
        # Within a container the path is one of the host's, and what holds here is at the mount's root.
        for group in (inside, *inside.parents):
            directory = mount / ("cpu" if controllers else "") / group
            found.append(_quota_of(directory, version=1 if controllers else 2))
    return min((each for each in found if each is not None), default=None)


def _quota_of(group: Path, version: int) -> float | None:
    with suppress(OSError, ValueError):  # no such file, or "max"
        if version == 2:
            most, period = (group / "cpu.max").read_text().split()
        else:
            most, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if int(most) > 0:
            return int(most) / int(period)
    return None


def _of_threads() -> Iterator[set[int]]:
    """Where each thread of this process may run; one that ends meanwhile is left out."""
    with suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError):
                yield os.sched_getaffinity(int(thread))


_AT_FIRST = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
