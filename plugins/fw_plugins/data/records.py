"""Records of files: a JSON object a line (JSONL, plain or gzipped), or rows of Parquet."""

from __future__ import annotations

import gzip
import importlib.util
import json
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fw.api import UserError

_PARQUET = ".parquet"
_ROWS = 1024
TOO_DEEP = "lists and objects in it are nested too deeply"
"""What is wrong with a record that Python gives up on."""

Bad = Callable[[str, str], None]
"""Is told where something is wrong, and what; may raise."""


class Record(NamedTuple):
    """``place``: file and line, or row, counted from 1."""

    place: str
    value: Mapping[str, Any]


class Source(Protocol):
    """Where records come from."""

    def identity(self) -> list[Any]:
        """What tells them from others, as JSON, without reading them."""

    def records(self, bad: Bad) -> Iterator[Record]:
        """All of them, in order.

        Args:
            bad: is told of what is no record.

        Raises:
            UserError: they cannot be read.
        """


class FileRecords:
    """Of files."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files

    def identity(self) -> list[Any]:
        """Names, sizes and times."""
        stats = [(str(file.resolve()), file.stat()) for file in self._files]
        return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]

    def records(self, bad: Bad) -> Iterator[Record]:
        """Of lines that are no JSON object ``bad`` is told."""
        for file in self._files:
            try:
                yield from _rows(file) if file.suffix == _PARQUET else _lines(file, bad)
            except OSError as error:
                raise UserError(f"data.files: {file} cannot be read: {error.strerror or error}") from None


def _read(file: Path) -> Generator[bytes, None, None]:
    """Lines of a file.

    Raises:
        UserError: it is compressed and broken; nobody can tell where the next line begins.
    """
    if file.suffix != ".gz":
        with file.open("rb") as lines:
            yield from lines
        return
    number = 1
    with gzip.open(file) as unpacked:
        try:
            for line in unpacked:
                yield line
                number += 1
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UserError(
                f"data.files: {file}:{number}: the gzip stream is broken ({error}), and nothing behind that can be read or skipped;"
                " write the file again"
            ) from None


def _lines(file: Path, bad: Bad) -> Iterator[Record]:
    with closing(_read(file)) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{file}:{number}"
            try:
                value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip())
            except UnicodeDecodeError as error:
                bad(place, f"it is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}")
            except json.JSONDecodeError as error:
                bad(place, f"it is no JSON: {error.msg} at column {error.colno}")
            except ValueError as error:  # Python's bound on digits of a number
                bad(place, f"it is no JSON that can be read: {error}")
            except RecursionError:
                bad(place, TOO_DEEP)
            else:
                if isinstance(value, dict):
                    yield Record(place, value)
                else:
                    bad(place, f"it is a {type(value).__name__}, not an object")


def without_empty(value: Any) -> Any:
    """A row of a table without what nested objects do not have: there every object has the fields of all."""
    if isinstance(value, Mapping):
        return {key: without_empty(inner) for key, inner in value.items() if inner is not None}
    return [without_empty(inner) for inner in value] if isinstance(value, list) else value


def _rows(file: Path) -> Iterator[Record]:
    if importlib.util.find_spec("pyarrow") is None:
        raise UserError(f"data.files: {file} is Parquet, which needs pyarrow: pip install fw[parquet]")
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        for batch in ParquetFile(file).iter_batches(_ROWS):
            for value in batch.to_pylist():
                number += 1
                yield Record(f"{file}: row {number}", without_empty(value))
    except ArrowException as error:
        raise UserError(f"data.files: {file} cannot be read as Parquet: {error}") from None
