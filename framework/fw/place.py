"""A directory of files: on a mounted file system, or behind any URL that fsspec knows (``s3://``, ``gs://``, ``memory://``)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from fw.errors import UserError


class Place(ABC):
    """Names are relative to the place, with ``/`` between directories. Whatever fails raises an ``OSError``."""

    @abstractmethod
    def __str__(self) -> str:
        """Path or URL, as a user writes it."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The last part of the path."""

    @property
    def local(self) -> Path | None:
        """The directory, where it is one of a mounted file system."""
        return None

    @abstractmethod
    def __truediv__(self, name: str) -> Place:
        """A place inside."""

    @abstractmethod
    def names(self) -> list[str]:
        """Files and directories right inside, sorted; none where the place does not exist."""

    @abstractmethod
    def files(self) -> dict[str, int]:
        """Sizes in bytes of all files inside, at any depth."""

    def make(self) -> None:
        """Make the directory, where there are directories."""
        if self.local is not None:
            self.local.mkdir(parents=True, exist_ok=True)

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is such a file."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Bytes of a file."""

    @abstractmethod
    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """A file, or the bytes from ``start`` up to ``end``."""

    @abstractmethod
    def open(self, name: str) -> BinaryIO:
        """A file, to be read from its beginning to its end."""

    @abstractmethod
    def create(self, name: str) -> BinaryIO:
        """A file to be written, unbuffered; what must survive is made durable by :meth:`finish`."""

    @abstractmethod
    def finish(self, file: BinaryIO) -> None:
        """Close a file that :meth:`create` opened; it is durable then."""

    def write(self, name: str, data: bytes) -> None:
        """Make a durable file of these bytes."""
        file = self.create(name)
        left = memoryview(data)
        try:
            while left:  # a disk that fills takes less than all, before it says so
                left = left[file.write(left) :]
        except BaseException:
            file.close()
            raise
        self.finish(file)

    @abstractmethod
    def remove(self, name: str | None = None) -> None:
        """Remove a file inside, or all of the place; what is not there is no error."""


class LocalPlace(Place):
    """A directory of a mounted file system."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    @property
    def name(self) -> str:
        """Of the directory."""
        return self._path.name

    @property
    def local(self) -> Path:
        """Itself."""
        return self._path

    def __truediv__(self, name: str) -> LocalPlace:
        return LocalPlace(self._path / name)

    def names(self) -> list[str]:
        """Sorted."""
        return sorted(os.listdir(self._path)) if self._path.is_dir() else []

    def files(self) -> dict[str, int]:
        """Links are followed."""
        found = (path for path in self._path.rglob("*") if path.is_file())
        return {path.relative_to(self._path).as_posix(): path.stat().st_size for path in sorted(found)}

    def has(self, name: str) -> bool:
        """A file, or a link to one."""
        return (self._path / name).is_file()

    def size(self, name: str) -> int:
        """From the file system."""
        return (self._path / name).stat().st_size

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """Whole, or some bytes."""
        with (self._path / name).open("rb") as file:
            file.seek(start or 0)
            return file.read() if end is None else file.read(end - (start or 0))

    def open(self, name: str) -> BinaryIO:
        """Unbuffered."""
        return cast(BinaryIO, (self._path / name).open("rb", buffering=0))

    def create(self, name: str) -> BinaryIO:
        """Directories in between are made; the place itself must be there (on a disk that ranks do not share it is not)."""
        path = self._path / name
        if path.parent != self._path and self._path.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
        return cast(BinaryIO, path.open("wb", buffering=0))

    def finish(self, file: BinaryIO) -> None:
        """``fsync``; the directory's entry is its owner's to make durable (:func:`sync`)."""
        try:
            os.fsync(file.fileno())
        finally:
            file.close()

    def remove(self, name: str | None = None) -> None:
        """A file, or the whole tree."""
        if name is None:
            shutil.rmtree(self._path, ignore_errors=True)
        else:
            (self._path / name).unlink(missing_ok=True)


class RemotePlace(Place):
    """A prefix of an object store. A file exists from the moment it is finished, whole; there is no renaming."""

    def __init__(self, fs: Any, root: str, protocol: str) -> None:
        self._fs, self._root, self._protocol = fs, root.rstrip("/"), protocol

    def __str__(self) -> str:
        return f"{self._protocol}://{self._root.lstrip('/')}"

    @property
    def name(self) -> str:
        """Of the prefix."""
        return PurePosixPath(self._root).name

    def __truediv__(self, name: str) -> RemotePlace:
        return RemotePlace(self._fs, f"{self._root}/{name}", self._protocol)

    def names(self) -> list[str]:
        """As the store lists them now, not as it did before."""
        with self._errors():
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
            return sorted({PurePosixPath(path.rstrip("/")).name for path in found} - {self.name})

    def files(self) -> dict[str, int]:
        """As the store lists them now."""
        with self._errors():
            self._fs.invalidate_cache()
            found = self._fs.find(self._root, detail=True)
            skip = len(self._fs._strip_protocol(self._root)) + 1
            return {path[skip:]: int(entry["size"]) for path, entry in sorted(found.items())}

    def has(self, name: str) -> bool:
        """Asks the store."""
        with self._errors():
            self._fs.invalidate_cache()
            return bool(self._fs.isfile(f"{self._root}/{name}"))

    def size(self, name: str) -> int:
        """Asks the store."""
        with self._errors():
            return int(self._fs.size(f"{self._root}/{name}"))

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """One request."""
        with self._errors():
            return bytes(self._fs.cat_file(f"{self._root}/{name}", start=start, end=end))

    def open(self, name: str) -> BinaryIO:
        """Read ahead by 16 MiB."""
        with self._errors():
            return cast(BinaryIO, _Remote(self._fs.open(f"{self._root}/{name}", "rb", block_size=1 << 24), self._errors, written=False))

    def create(self, name: str) -> BinaryIO:
        """Uploaded in parts of 16 MiB."""
        with self._errors():
            return cast(BinaryIO, _Remote(self._fs.open(f"{self._root}/{name}", "wb", block_size=1 << 24), self._errors, written=True))

    def finish(self, file: BinaryIO) -> None:
        """The store has it all when this returns."""
        assert isinstance(file, _Remote)
        with self._errors():
            file.file.close()

    def remove(self, name: str | None = None) -> None:
        """One object, or all with the prefix."""
        with self._errors(), contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._root if name is None else f"{self._root}/{name}", recursive=name is None)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Clients of stores raise errors of their own kinds; here each is an ``OSError`` whose text says what the store said."""
        try:
            yield
        except OSError as error:
            raise type(error)(error.errno or errno.EIO, error.strerror or str(error) or type(error).__name__, str(self)) from error
        except Exception as error:
            text = (str(error).strip().splitlines() or [""])[0]
            raise OSError(errno.EIO, f"{type(error).__name__}: {text}", str(self)) from error


class _Remote:
    """A file of a store, whose errors are translated; closing it unfinished leaves no object."""

    def __init__(self, file: Any, errors: Callable[[], contextlib.AbstractContextManager[None]], written: bool) -> None:
        self.file, self._errors, self._written = file, errors, written

    def write(self, data: bytes | memoryview) -> int:
        """The store's client cannot keep a view: it is copied."""
        with self._errors():
            return int(self.file.write(data if isinstance(data, bytes) else bytes(data)))

    def read(self, size: int = -1) -> bytes:
        """Up to ``size`` bytes."""
        with self._errors():
            return bytes(self.file.read(size))

    def close(self) -> None:
        """Give up what is being written; end reading."""
        if self._written:
            with contextlib.suppress(Exception):
                self.file.discard()
                self.file.closed = True  # or it would be uploaded when it is collected
        else:
            self.file.close()

    def __enter__(self) -> _Remote:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def place(where: str | Path | Place) -> Place:
    """The place a path or URL means.

    Raises:
        UserError: no such protocol, or what it needs is not installed.
    """
    if isinstance(where, Place):
        return where
    text = str(where)
    protocol = text.partition("://")[0] if "://" in text else "file"
    if protocol in ("file", "local"):
        return LocalPlace(Path(text.partition("://")[2] if "://" in text else where).expanduser())
    import fsspec  # type: ignore[import-untyped]  # takes a moment, and most runs need none of it

    try:
        fs, root = fsspec.core.url_to_fs(text)
    except (ImportError, ValueError) as error:
        raise UserError(f"{text}: {(str(error).strip().splitlines() or [''])[0]}") from None
    return RemotePlace(fs, root, protocol)


def sync(path: Path) -> None:
    """Flush a file, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exchange(one: Path, other: Path) -> bool:
    """Swap two directories in one operation of the file system; False where it has none (``renameat2(2)``, Linux)."""
    if sys.platform != "linux":
        return False
    at_working_directory, swap = -100, 2
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    return bool(renameat2(at_working_directory, os.fsencode(one), at_working_directory, os.fsencode(other), swap) == 0)
