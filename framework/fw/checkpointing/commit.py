"""A directory that has its final name is whole: written aside, hashed, made durable, then renamed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from fw.checkpointing.stream import Digest
from fw.errors import RunError, UserError

MANIFEST = "manifest.json"
FORMAT = 1


def hash_file(path: Path) -> Digest:
    """Size and SHA-256 of a file as it is on disk."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return Digest(path.stat().st_size, digest.hexdigest())


def write_manifest(directory: Path, known: Mapping[str, Digest], facts: Mapping[str, object]) -> None:
    """Write the manifest over every file of ``directory``, last of all, and make everything durable.

    Args:
        known: digests of files that were hashed while they were written; the others are read back.
    """
    files: dict[str, dict[str, object]] = {}
    for path in sorted(p for p in directory.rglob("*") if p.is_file() and p.name != MANIFEST):
        name = path.relative_to(directory).as_posix()
        digest = known.get(name) or hash_file(path)
        files[name] = {"size": digest.size, "sha256": digest.sha256}
        if name not in known:
            sync(path)
    body: dict[str, object] = {"format": FORMAT, **facts, "files": files, "sha256": ""}
    body["sha256"] = _own_digest(body)
    manifest = directory / MANIFEST
    manifest.write_text(json.dumps(body, indent=1) + "\n")
    sync(manifest)
    sync(directory)


def read_manifest(directory: Path) -> dict[str, object]:
    """The manifest of a checkpoint.

    Raises:
        UserError: there is none, it is damaged, or it is of a newer format.
    """
    path = directory / MANIFEST
    try:
        body = json.loads(path.read_text())
        version, own = body["format"], body["sha256"]
    except FileNotFoundError:
        raise UserError(f"{directory} is no checkpoint: it has no {MANIFEST}") from None
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(f"{directory} is no whole checkpoint: its {MANIFEST} is damaged ({error})") from None
    if version > FORMAT:
        raise UserError(f"{directory} has checkpoint format {version}, this fw reads up to {FORMAT}; upgrade fw")
    if own != _own_digest({**body, "sha256": ""}):
        raise UserError(f"{directory} is no whole checkpoint: its {MANIFEST} does not match its own digest")
    return dict(body)


def _own_digest(body: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def verify(directory: Path) -> None:
    """Compare every file with the manifest.

    Raises:
        RunError: what is missing or differs, by name.
    """
    wrong = []
    files = read_manifest(directory)["files"]
    assert isinstance(files, dict)
    for name, expected in files.items():
        path = directory / name
        if not path.is_file():
            wrong.append(f"{name} is missing")
        elif path.stat().st_size != expected["size"]:
            wrong.append(f"{name} has {path.stat().st_size} bytes instead of {expected['size']}")
        elif hash_file(path).sha256 != expected["sha256"]:
            wrong.append(f"{name} has other bytes than were written")
    if wrong:
        raise RunError(f"checkpoint {directory} is damaged: {'; '.join(wrong)}")


def publish(temporary: Path, final: Path) -> None:
    """Give a finished directory its name, replacing what bears it, and point ``latest`` beside it there."""
    parent = final.parent
    if final.exists():
        old = parent / f"{final.name}.old.tmp"
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)
        os.rename(temporary, final)
        shutil.rmtree(old)
    else:
        os.rename(temporary, final)
    sync(parent)
    link = parent / "latest.tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(final.name, target_is_directory=True)
    os.replace(link, parent / "latest")
    sync(parent)


def sync(path: Path) -> None:
    """Flush a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
