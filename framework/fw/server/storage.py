"""A directory that one server has: records, which are JSON, and contents, by ids."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import re
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from pydantic import BaseModel

from fw.errors import UserError, describe
from fw.place import sync
from fw.server.errors import ApiError

FILE, BATCH = "file-", "batch_"
_ID = re.compile(rf"(?:{FILE}|{BATCH})[0-9a-f]{{24}}")
_PART, _RECORD = ".part", ".json"
_BY_OTHERS = 0o022
_T = TypeVar("_T")
_R = TypeVar("_R", bound=BaseModel)


def new_id(kind: str) -> str:
    """Of a file or a batch; later ones come after earlier ones."""
    return f"{kind}{time.time_ns():016x}{secrets.token_hex(4)}"


def made_at(id: str) -> int:
    """When it was given, in seconds since 1970."""
    return int(id[-24:-8], 16) // 1_000_000_000


def is_id(text: str, kind: str) -> bool:
    """Whether it may be one; nothing else becomes part of a path."""
    return text.startswith(kind) and _ID.fullmatch(text) is not None


def no_room(error: OSError) -> ApiError:
    """Of what cannot be written."""
    return ApiError(507, f"the server cannot keep this: {error.strerror or error}", "storage_failed")


async def undivided(work: Coroutine[Any, Any, _T]) -> _T:
    """Work that is not left half done where who waits for it is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


class Storage:
    """The directory, which no other server has.

    Args:
        where: empty for a directory that is gone in the end.

    Raises:
        UserError: it cannot be used, or another server has it.
    """

    def __init__(self, where: str) -> None:
        self._temporary = None if where else tempfile.TemporaryDirectory(prefix="fw-files-")
        self._directory = Path(where if self._temporary is None else self._temporary.name).expanduser().absolute()
        self._lock = _held(self._directory)
        self._writing = asyncio.Lock()
        for left in self._directory.glob(f"*{_PART}"):
            if _ID.match(left.name):
                left.unlink()

    def path(self, id: str) -> Path:
        """Of a content."""
        assert _ID.fullmatch(id)
        return self._directory / id

    def create(self, id: str) -> BinaryIO:
        """A content that is there when it is :meth:`finish`-ed."""
        return self._open(f"{id}{_PART}", os.O_TRUNC)

    def finish(self, id: str, suffix: str = "") -> None:
        """It is whole, and durable."""
        part = self._directory / f"{id}{_PART}"
        sync(part)
        part.rename(self.path(id).with_suffix(suffix))
        sync(self._directory)

    def discard(self, id: str) -> None:
        """What is not finished."""
        (self._directory / f"{id}{_PART}").unlink(missing_ok=True)

    def append(self, id: str, data: bytes) -> None:
        """To a content, which need not be there yet."""
        with self._open(id, os.O_APPEND) as file:
            file.write(data)

    def records(self, kind: type[_R], prefix: str) -> dict[str, _R]:
        """All that there are, by their ids.

        Raises:
            UserError: one is none.
        """
        found = {}
        for path in sorted(self._directory.glob(f"{prefix}*{_RECORD}")):
            if is_id(path.stem, prefix):
                try:
                    found[path.stem] = kind.model_validate_json(path.read_bytes())
                except (OSError, ValueError) as error:
                    raise UserError(f"serve.files_dir: {path} is none of this server's records ({describe(error)}); remove it") from None
        return found

    async def write(self, id: str, record: BaseModel) -> None:
        """A record, as it is when its turn comes: durable, and never there in part. Whatever fails raises an ``OSError``."""
        await undivided(self._write(id, record))

    async def _write(self, id: str, record: BaseModel) -> None:
        def durably(text: bytes) -> None:
            try:
                with self.create(id) as file:
                    file.write(text)
                self.finish(id, _RECORD)
            finally:
                self.discard(id)

        async with self._writing:
            await asyncio.to_thread(durably, record.model_dump_json().encode())

    def remove(self, id: str) -> None:
        """A record and its content."""
        self.path(id).with_suffix(_RECORD).unlink(missing_ok=True)
        self.path(id).unlink(missing_ok=True)

    def tidy(self, wanted: Callable[[str], bool]) -> None:
        """Contents of which nobody knows go."""
        for path in self._directory.iterdir():
            if _ID.fullmatch(path.name) and not wanted(path.name):
                path.unlink()

    async def close(self) -> None:
        """Another server may have it, or it is gone."""
        async with self._writing:
            os.close(self._lock)
            if self._temporary is not None:
                self._temporary.cleanup()

    def _open(self, name: str, how: int) -> BinaryIO:
        file = os.open(self._directory / name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | how, 0o600)
        return cast(BinaryIO, os.fdopen(file, "wb"))


def _held(directory: Path) -> int:
    """A lock on it, for as long as this process lives."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.stat().st_mode & _BY_OTHERS:
            raise UserError(f"serve.files_dir: others may write into {directory}; give a directory within it, which will be made")
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UserError(f"serve.files_dir: {directory} cannot be used: {error.strerror}; give another") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            return lock  # a file system without locks
        who = os.read(lock, 200).decode(errors="replace").strip() or "unknown process"
        os.close(lock)
        raise UserError(f"serve.files_dir: another server is using {directory} ({who}); end it, or give another directory") from None
    os.truncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return lock
