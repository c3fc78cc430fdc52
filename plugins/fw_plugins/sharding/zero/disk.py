"""Directories on a disk for what is offloaded to it: free space first, one for each rank, none left behind."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

from fw.kinds.sharding import StepSpec
from fw_plugins.sharding import space

_OPTIMIZER_BYTES = 16
"""Per parameter: fp32 weights, their gradient and two moments. An optimizer of fewer states takes less."""


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
    if path.is_dir():
        _remove_abandoned(path)
    space.check_space(path, bytes_per_rank(spec, numel, ranks), min(spec.ranks_per_host, ranks))


def own_directory(path: Path) -> Path:
    """A directory that no other rank and no other run uses; :func:`remove` ends it."""
    own = path / f"fw-{socket.gethostname()}-{os.getpid()}"
    remove(own)
    own.mkdir(parents=True)
    return own


def remove(own: Path) -> None:
    """What :func:`own_directory` gave, with all in it."""
    shutil.rmtree(own, ignore_errors=True)


def _remove_abandoned(path: Path) -> None:
    """What runs of this host that were killed have left."""
    for left in path.glob(f"fw-{socket.gethostname()}-*"):
        process = left.name.rpartition("-")[2]
        if process.isdigit() and not Path("/proc", process).exists() and Path("/proc/self").exists():
            remove(left)
