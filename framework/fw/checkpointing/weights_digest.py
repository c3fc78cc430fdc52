"""What tells weights from others: all of their bytes, or a little of every tensor."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from fw.bars import Bar
from fw.caches import cache_dir
from fw.locate import CONFIG

_PIECE = 1 << 26
"""Bytes that one thread hashes; part of what a digest is."""
_READ = 1 << 22
_SAMPLE = 1 << 12
"""Bytes from the middle of each tensor."""
_LARGEST_HEADER = 100_000_000
_SETTLED_NS = 2_000_000_000
"""A file that was changed within this time may change again without its times showing it, and is not remembered."""
_OF_NO_EFFECT = ("transformers_version", "_name_or_path")
"""Of a config.json, on what a model computes."""


def weights_digest(directory: Path) -> str:
    """Of a model directory: what config.json says, and every byte of the safetensors, with their names; SHA-256 in hexadecimal digits.

    Files are hashed by all cores, which takes about as long as reading them. The digest of one that has not changed since (inode, size,
    times) is remembered in fw's cache.
    """
    told = hashlib.sha256(_config(directory))
    files = sorted(directory.glob("*.safetensors"))
    with (
        ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), 16)) as threads,
        Bar(total=sum(file.stat().st_size for file in files), desc="hashing weights", unit="B", unit_scale=True) as bar,
    ):
        for file in files:
            told.update(f"{file.name} {_of_file(file, threads)}".encode())
            bar.update(file.stat().st_size)
    return told.hexdigest()


def sampled_digest(directory: Path) -> str:
    """Of a model directory's safetensors: names, sizes, headers, ends, 4 KiB from the middle of each tensor; SHA-256 in hexadecimal digits.

    For a record, where reading all would take too long: what trains or merges whole tensors changes some of these, what changes a few rows
    of one may not.
    """
    told = hashlib.sha256()
    for file in sorted(directory.glob("*.safetensors")):
        told.update(f"{file.name} {file.stat().st_size}".encode())
        with file.open("rb", buffering=0) as opened:
            for begin, end in _samples(opened.fileno(), file.stat().st_size):
                told.update(os.pread(opened.fileno(), end - begin, begin))
    return told.hexdigest()


def _samples(file: int, size: int) -> Iterator[tuple[int, int]]:
    """Where the header lies, the end, and the middle of each tensor; of what is no safetensors file, beginning and end."""
    start = os.pread(file, 8, 0)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    first = 8 + (length if length <= _LARGEST_HEADER else 0)
    yield 0, first
    yield max(0, size - _SAMPLE), size
    try:
        tensors = json.loads(os.pread(file, first - 8, 8))
        tensors.pop("__metadata__", None)
        places = sorted(tuple(tensor["data_offsets"]) for tensor in tensors.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return
    for begin, end in places:
        middle = max(begin, (begin + end - _SAMPLE) // 2)
        yield first + middle, first + min(middle + _SAMPLE, end)


def _config(directory: Path) -> bytes:
    try:
        found = json.loads((directory / CONFIG).read_text())
        kept = {key: value for key, value in found.items() if key not in _OF_NO_EFFECT}
    except (OSError, ValueError, AttributeError):  # who reads the model says what is wrong with it
        return b""
    return json.dumps(kept, sort_keys=True).encode()


def _of_file(file: Path, threads: ThreadPoolExecutor) -> str:
    before = _state(file)
    noted = cache_dir() / "digests" / f"{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:32]}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(noted.read_text())
        if known["state"] == before:
            return str(known["digest"])
    pieces = threads.map(lambda begin: _of_piece(file, begin), range(0, before["size"], _PIECE))
    digest = hashlib.sha256(b"".join(pieces)).hexdigest()
    if before == _state(file) and time.time_ns() - max(before["mtime_ns"], before["ctime_ns"]) > _SETTLED_NS:
        with suppress(OSError):  # it is hashed again the next time
            noted.parent.mkdir(parents=True, exist_ok=True)
            hidden = noted.with_suffix(f".{os.getpid()}.tmp")
            hidden.write_text(json.dumps({"file": str(file), "state": before, "digest": digest}))
            os.replace(hidden, noted)
    return digest


def _state(file: Path) -> dict[str, int]:
    """What changes with a file's content; who sets its times back changes ``ctime_ns`` by that."""
    found = file.stat()
    return {name: getattr(found, f"st_{name}") for name in ("dev", "ino", "size", "mtime_ns", "ctime_ns")}


def _of_piece(file: Path, begin: int) -> bytes:
    told, room, left = hashlib.sha256(), memoryview(bytearray(_READ)), _PIECE
    with file.open("rb", buffering=0) as opened:
        opened.seek(begin)
        while left and (count := opened.readinto(room[: min(_READ, left)])):
            told.update(room[:count])
            left -= count
    return told.digest()
