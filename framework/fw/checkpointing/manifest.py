"""The last file of a checkpoint: size and SHA-256 of every other one, and of its own bytes."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from fw.errors import UserError
from fw.kinds.checkpoint import NewerFormatError
from fw.place import Place

MANIFEST = "manifest.json"
FORMAT = 2
"""1: random states in ``rng.safetensors``, and a digest of the manifest's values rather than of its bytes."""

_STEP = re.compile(r"step-(\d+)")
_BLANK = "0" * 64
_TAIL = re.compile(rb'"sha256": "([0-9a-f]{64})"\n}\n\Z')
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Digest:
    """Size in bytes and SHA-256 of a file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        facts: everything else that was written: ``step``, ``world_size``, ``mesh``, ``metrics``, ``number`` (which of its directory's
            checkpoints it is, counted in the order of writing) and ``parent`` (the one its run went on from).
        digest: the manifest's own.
    """

    format: int
    files: Mapping[str, Digest]
    digest: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(digest.size for digest in self.files.values())


def write_manifest(directory: Place, files: Mapping[str, Digest], facts: Mapping[str, Any]) -> Manifest:
    """Write the manifest, last of all; durable when this returns."""
    listed = {name: {"size": digest.size, "sha256": digest.sha256} for name, digest in sorted(files.items())}
    body: dict[str, Any] = {"format": FORMAT, **facts, "files": listed, "sha256": _BLANK}
    text = (json.dumps(body, indent=1) + "\n").encode()
    own = hashlib.sha256(text).hexdigest()
    directory.write(MANIFEST, text[: text.rindex(_BLANK.encode())] + own.encode() + text[-len('"\n}\n') :])
    return Manifest(FORMAT, files, own, facts)


def read_manifest(directory: Place) -> Manifest:
    """The manifest of a checkpoint, its own bytes checked.

    Raises:
        UserError: there is none, it is damaged, or it is of a newer format.
    """
    try:
        data = directory.read(MANIFEST)
    except FileNotFoundError:
        raise UserError(f"{directory} is no checkpoint: it has no {MANIFEST}") from None
    except OSError as error:
        raise UserError(f"{directory} cannot be read: {error.strerror or error}") from None
    try:
        body = json.loads(data)
        version, own = body.pop("format"), body.pop("sha256")
        files = {name: Digest(entry["size"], entry["sha256"]) for name, entry in body.pop("files").items()}
        newer = version > FORMAT
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{directory} is no whole checkpoint: its {MANIFEST} is damaged ({type(error).__name__}: {error})") from None
    # The digest stays where it is in formats to come, so that a damaged version is told from a newer one.
    if own != (_digest_of_values(data) if version == 1 else _digest_of_bytes(data)):
        raise UserError(f"{directory} is no whole checkpoint: its {MANIFEST} does not match its own digest")
    if newer:
        raise NewerFormatError(f"{directory} has checkpoint format {version}, this fw reads up to {FORMAT}; upgrade fw")
    if (named := _STEP.fullmatch(directory.name)) and body.get("step", int(named[1])) != int(named[1]):
        raise UserError(f"{directory} is no whole checkpoint: its {MANIFEST} is that of step {body['step']}")
    return Manifest(version, files, own, body)


def _digest_of_bytes(data: bytes) -> str:
    """With the digest's field blanked; nothing may follow it."""
    found = _TAIL.search(data)
    return hashlib.sha256(data[: found.start(1)] + _BLANK.encode() + data[found.end(1) :]).hexdigest() if found else ""


def _digest_of_values(data: bytes) -> str:
    body = {**json.loads(data), "sha256": ""}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def hash_file(directory: Place, name: str, progress: Callable[[int], object] = lambda count: None) -> Digest:
    """Size and SHA-256 of a file as it is read back. ``progress`` hears the bytes of each block."""
    digest, size = hashlib.sha256(), 0
    with directory.open(name) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
            progress(len(block))
    return Digest(size, digest.hexdigest())


def damages(
    directory: Place, manifest: Manifest, names: Iterable[str] | None = None, progress: Callable[[int], object] = lambda count: None
) -> list[str]:
    """What of a checkpoint is not as it was written, a sentence each.

    Args:
        names: the files to read; all of them where None.
        progress: hears of bytes read.
    """

    def damage(name: str) -> str | None:
        expected = manifest.files[name]
        try:
            if not directory.has(name):
                return f"{name} is missing"
            if (size := directory.size(name)) != expected.size:
                return f"{name} has {size} bytes instead of {expected.size}"
            if hash_file(directory, name, progress).sha256 != expected.sha256:
                return f"{name} has other bytes than were written"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror or error}"
        return None

    wanted = sorted(manifest.files if names is None else names, key=lambda name: -manifest.files[name].size)
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        found = [text for text in pool.map(damage, wanted) if text]
    return sorted(found)


def strangers(directory: Place, manifest: Manifest) -> list[str]:
    """Tensor files and indices that the manifest does not know, such as another checkpoint's."""
    return [n for n in directory.files() if n not in manifest.files and n.endswith((".safetensors", ".safetensors.index.json"))]
