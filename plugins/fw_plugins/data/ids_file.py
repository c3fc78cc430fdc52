"""Ids of documents on disk, written so that who is interrupted goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fw.api import Bar

_BATCH = 256
_READ = 1 << 20


class _Encodes(Protocol):
    def encode_all(self, texts: list[str], *, add_special_tokens: bool = True, split_special_tokens: bool = False) -> list[list[int]]:
        """Ids of many texts, by all cores."""


def sizes_of(file: Path) -> Path:
    """Of the documents in a file of ids: the numbers of their ids, little-endian int64, in a file beside it."""
    return file.with_suffix(".sizes")


def write_ids(file: Path, texts: Iterator[str], tokenizer: _Encodes, eos_id: int, dtype: str, label: str, total: int) -> None:
    """``EOS document EOS document EOS`` as raw little-endian ids, and the documents' numbers of them beside it.

    What an earlier call has written of the same texts is kept: their first documents are not encoded again.
    """
    progress = file.with_suffix(".progress")
    eos = np.array([eos_id], dtype)
    with file.open("ab") as out, sizes_of(file).open("ab") as sizes:
        documents = _kept(progress, {file: out.fileno(), sizes_of(file): sizes.fileno()})
        if not documents:
            out.truncate(0)
            sizes.truncate(0)
            out.write(eos.tobytes())
        for _ in islice(texts, documents):
            pass
        with Bar(total=total, initial=documents, desc=label, unit=" documents") as bar:
            while batch := list(islice(texts, _BATCH)):
                for ids in tokenizer.encode_all(batch, add_special_tokens=False, split_special_tokens=True):
                    out.write(np.array(ids, dtype).tobytes() + eos.tobytes())
                    sizes.write(np.int64(len(ids)).astype("<i8").tobytes())
                documents += len(batch)
                out.flush()
                sizes.flush()
                _note(progress, {"documents": documents, "bytes": _bytes(file)})
                bar.update(len(batch))
        for written in (out, sizes):
            written.flush()
            os.fsync(written.fileno())
    _note(_done(file), {"bytes": _bytes(file)})
    progress.unlink(missing_ok=True)


def is_whole(file: Path) -> bool:
    """Whether :func:`write_ids` has come to its end, and all that it wrote is there."""
    try:
        return bool(json.loads(_done(file).read_text())["bytes"] == _bytes(file))
    except (OSError, ValueError, KeyError):
        return False


def _done(file: Path) -> Path:
    return file.with_suffix(".done")


def _bytes(file: Path) -> list[int]:
    return [file.stat().st_size, sizes_of(file).stat().st_size]


def pieces(file: Path) -> Iterable[bytes]:
    """A file's bytes, some at a time."""
    with file.open("rb") as read:
        while piece := read.read(_READ):
            yield piece


def _kept(progress: Path, files: dict[Path, int]) -> int:
    """Documents that are whole in the files, which end behind them; 0 where nobody says."""
    try:
        said = json.loads(progress.read_text())
    except (OSError, ValueError):
        return 0
    if any(path.stat().st_size < size for path, size in zip(files, said["bytes"], strict=True)):
        return 0
    for descriptor, size in zip(files.values(), said["bytes"], strict=True):
        os.truncate(descriptor, size)
    documents: int = said["documents"]
    return documents


def _note(progress: Path, said: dict[str, object]) -> None:
    hidden = progress.with_suffix(f"{progress.suffix}.tmp")
    hidden.write_text(json.dumps(said))
    os.replace(hidden, progress)


def lengths_of(file: Path) -> NDArray[np.int64]:
    """Ids of each document."""
    return np.fromfile(sizes_of(file), "<i8")
