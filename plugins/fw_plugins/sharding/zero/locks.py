"""The lock torch puts into the directory of a build (``torch.utils.file_baton``): who holds it, and what a killed build has left.

Whoever builds keeps the file open until it is done; everyone else waits, without a word and without end, for it to go away.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from fw.api import RunError

LOCK = "lock"
_SECONDS = 0.5


def holder(lock: Path) -> int | None:
    """The process of this host that has the file open; None where no living one has."""
    try:
        wanted = os.stat(lock)
    except FileNotFoundError:
        return None
    for process in Path("/proc").glob("[0-9]*"):
        try:
            for opened in (process / "fd").iterdir():
                found = opened.stat()
                if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                    return int(process.name)
        except OSError:  # it has ended, or is another user's
            continue
    return None


def clear(directory: Path, say: Callable[[str], None], waiting: Callable[[str], None]) -> None:
    """Return when nothing holds the directory: wait for a living process, remove what a dead one has left.

    Args:
        waiting: is called again and again while a living process builds.

    Raises:
        RunError: the lock is another user's, whose processes cannot be seen.
    """
    lock = directory / LOCK
    while lock.exists():
        process = holder(lock)
        if process is not None:
            waiting(f"process {process} builds in {directory}; waiting for it")
            time.sleep(_SECONDS)
            continue
        if not Path("/proc/self/fd").exists() or (lock.exists() and lock.stat().st_uid != os.getuid() != 0):
            raise RunError(f"{lock}: it cannot be seen from here whether the build it belongs to goes on; remove it if none does")
        # Between closing and removing it, a build that ends holds it no longer.
        time.sleep(_SECONDS)
        if lock.exists() and holder(lock) is None:
            lock.unlink(missing_ok=True)
            say(f"{lock} was left by a build that was killed; removed")
