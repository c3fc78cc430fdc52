"""What is made of data once and kept: a directory for each input and settings."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path

from fw.api import UserError, cache_dir

META = "meta.json"
"""A file of every finished directory."""


class Hopeless(UserError):
    """What is wrong is in the input itself: nobody goes on from what was made so far."""


def cached(given: str, name: str, build: Callable[[Path], None], resumes: bool = False) -> Path:
    """The directory ``name``, made by ``build`` where it is not there yet: by one process at a time, and whole or not at all.

    Args:
        given: where; empty for $FW_CACHE, else fw under the user's cache directory.
        build: fills a directory, :data:`META` last.
        resumes: whether ``build`` goes on with what an earlier call had made of the same when it failed or was interrupted.

    Raises:
        UserError: the cache cannot be made.
    """
    root = Path(given).expanduser() if given else cache_dir()
    directory = root / name
    if (directory / META).is_file():
        return directory
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"data.cache_dir: {root} cannot be made: {error.strerror}; give another one") from None
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file closes, also by a kill
        if (directory / META).is_file():
            return directory
        temporary = directory.with_name(f"{name}.tmp")
        if not resumes:  # what a killed process has left
            shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(exist_ok=True)
        try:
            build(temporary)
        except BaseException as error:
            if not resumes or isinstance(error, Hopeless):
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        shutil.rmtree(directory, ignore_errors=True)
        temporary.rename(directory)
    return directory
