"""Directories on a disk for what is offloaded to it: free space first, one for each rank, none left behind."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from fw.api import StepSpec, allow_open_files
from fw_plugins.sharding import space

_OPTIMIZER_BYTES = 16
"""Per parameter: fp32 weights, their gradient and two moments. An optimizer of fewer states takes less."""

_PREFIX = "fw-zero-"


def bytes_per_rank(spec: StepSpec, numel: int, ranks: int) -> int:
    """What a rank writes at most, of a model of ``numel`` elements."""
    each = _OPTIMIZER_BYTES * (spec.offload.optimizer == "nvme") + spec.precision.compute.itemsize * (spec.offload.params == "nvme")
    return each * -(-numel // ranks)


def check_space(spec: StepSpec, numel: int, ranks: int) -> None:
    """See that the directory can be written and holds what the ranks of this host will write.

    Raises:
        UserError: it cannot, or does not.
    """
    path = spec.offload.path
    assert path is not None, "the offload plugin asks for it"
    _remove_abandoned(path)
    space.check_space(path, bytes_per_rank(spec, numel, ranks), min(spec.ranks_per_host, ranks))


class OwnDirectory:
    """A new directory that is this process's alone.

    A lock says so, which ends with the process however that ends; containers that share a disk may share names and process numbers.
    """

    def __init__(self, parent: Path) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(parent)
        allow_open_files()
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            if (lock := _lock(self.path)) is not None and self.path.exists():  # else another took it for abandoned before it was locked
                self._lock: int | None = lock
                return

    def remove(self) -> None:
        """With all in it."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def _lock(directory: Path) -> int | None:
    """None where another process holds it, or another user made it."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_abandoned(parent: Path) -> None:
    """What processes that were killed have left."""
    for left in parent.glob(f"{_PREFIX}*"):
        if (lock := _lock(left)) is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)
