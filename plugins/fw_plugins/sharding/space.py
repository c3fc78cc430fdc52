"""Room for what is offloaded to a disk."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from fw.api import UserError, format_size


def check_space(path: Path, bytes_per_rank: int, ranks: int) -> None:
    """See that the directory can be written to and holds what the ranks of this host will write.

    Raises:
        UserError: it cannot, or does not.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            free = shutil.disk_usage(path).free
    except OSError as error:
        raise UserError(f"offload.path: {path} cannot be written to: {error.strerror}; give another directory") from None
    if (needed := ranks * bytes_per_rank) > free:
        raise UserError(
            f"offload.path: {path} has {format_size(free)} free, and {ranks} rank{'s' * (ranks > 1)} on this host would write"
            f" {format_size(needed)}; give a larger disk, or offload to cpu"
        )
