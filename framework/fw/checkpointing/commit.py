"""A checkpoint that has a name is whole: written aside, hashed, made durable, then renamed; then ``latest`` moves.

An object store has no renaming. There a step's files stand under their final names before the step is whole, and the manifest, written
last, is what makes it a checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from concurrent.futures import ThreadPoolExecutor

from fw.checkpointing.manifest import MANIFEST, Manifest, read_manifest
from fw.errors import UserError
from fw.place import LocalPlace, Place, exchange, sync

LATEST = "latest"
_STEP = re.compile(r"step-\d{8,}")
_LEFT_OVER = re.compile(r"(step-\d{8,}.*|latest)\.tmp")
_OLD = ".old.tmp"
"""What a step is called while another takes its name."""


def step_name(step: int) -> str:
    """Of the directory."""
    return f"step-{step:08d}"


def draft(directory: Place, name: str) -> Place:
    """Where a checkpoint is written before it has its name."""
    return directory / (name if directory.local is None else f"{name}.tmp")


def begin(directory: Place, name: str) -> None:
    """Make the draft, empty.

    Raises:
        OSError: it cannot be made.
    """
    if directory.local is None:
        remove(directory, name)
        return
    made = draft(directory, name)
    made.remove()
    made.make()


def publish(directory: Place, written: Place, name: str) -> None:
    """Give a finished draft its name, replacing what bears it, and move ``latest`` there. Durable when this returns."""
    if directory.local is None:
        directory.write(LATEST, name.encode())
        return
    assert written.local is not None
    path, final = directory.local, directory.local / name
    for inside in (written.local, *(p for p in written.local.rglob("*") if p.is_dir())):
        sync(inside)
    if final.exists():
        if not exchange(written.local, final):
            aside = path / f"{name}{_OLD}"
            LocalPlace(aside).remove()
            os.rename(final, aside)
            os.rename(written.local, final)
            LocalPlace(aside).remove()
    else:
        os.rename(written.local, final)
    sync(path)
    written.remove()  # after an exchange, what bore the name before
    point_latest(directory, name)


def check_latest(directory: Place) -> None:
    """See that ``latest`` can be moved.

    Raises:
        UserError: it is a directory.
    """
    if directory.local is not None and (directory.local / LATEST).is_dir() and not (directory.local / LATEST).is_symlink():
        raise UserError(f"{directory.local / LATEST} is a directory, as copies that follow links make; remove it, steps have all it holds")


def point_latest(directory: Place, name: str) -> None:
    """Make ``latest`` mean a step: a link, or where there are none, an object that holds its name."""
    if directory.local is None:
        directory.write(LATEST, name.encode())
        return
    link = directory.local / f"{LATEST}.tmp"
    link.unlink(missing_ok=True)
    try:
        link.symlink_to(name, target_is_directory=True)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        link.write_text(name)  # a file system without links
    os.replace(link, directory.local / LATEST)
    sync(directory.local)


def latest(directory: Place) -> str | None:
    """The step ``latest`` means; None where it means none that is there."""
    name = ""
    if directory.local is not None:
        with contextlib.suppress(OSError):
            name = os.readlink(directory.local / LATEST)
    if not name:
        try:
            name = directory.read(LATEST).decode("ascii", "replace").strip()
        except OSError:
            return None
    return name if _STEP.fullmatch(name) and (directory / name).has(MANIFEST) else None


def steps(directory: Place) -> list[str]:
    """Names of the checkpoints in a directory, by step; on an object store, of what may be one."""
    return sorted((name for name in directory.names() if _STEP.fullmatch(name)), key=_number)


def history(directory: Place) -> list[str]:
    """The checkpoints in the order in which a run should go on from them: the one written last, those its run had come by, then the others.

    Damaged ones are among them, where their step puts them.
    """
    known = manifests(directory)

    def order(name: str) -> tuple[int, int]:
        manifest = known[name]
        if manifest is not None:
            return int(manifest.facts.get("number", 0)), _number(name)
        below = [order(other)[0] for other, m in known.items() if m is not None and _number(other) < _number(name)]
        return max(below, default=0), _number(name)

    rest = sorted(known, key=order, reverse=True)
    found: list[str] = []
    while rest:
        name = rest.pop(0)
        found.append(name)
        manifest = known[name]
        parent = manifest.facts.get("parent") if manifest is not None else None
        if parent in rest:
            rest.remove(parent)
            rest.insert(0, parent)
    return found


def steps_at(where: Place) -> list[Place]:
    """The checkpoints that a place means: itself, or those in it or in its ``checkpoints``, the one to go on from first.

    Raises:
        UserError: there are none.
    """
    if where.has(MANIFEST):
        return [where]
    for directory in (where, where / "checkpoints"):
        if names := history(directory):
            return [directory / name for name in names]
    missing = where.local is not None and not where.local.exists()
    raise UserError(f"{where}: no such directory" if missing else f"{where} holds no checkpoint: neither {MANIFEST} nor step directories")


def next_number(directory: Place, parent: str | None = None) -> int:
    """What the next checkpoint's ``number`` is: beyond that of the last one, which is what ``latest`` means or the run went on from."""
    last = [name for name in {latest(directory), parent} if name is not None and (directory / name).has(MANIFEST)]
    numbers = [0]
    for name in last or steps(directory):
        with contextlib.suppress(UserError, TypeError, ValueError):
            numbers.append(int(read_manifest(directory / name).facts.get("number", 0)))
    return max(numbers) + 1


def manifests(directory: Place) -> dict[str, Manifest | None]:
    """Of all steps; None for a damaged one. What an object store holds without one was never finished and is left out."""

    def read(name: str) -> tuple[str, Manifest | None, bool]:
        try:
            return name, read_manifest(directory / name), True
        except UserError:
            return name, None, directory.local is not None or (directory / name).has(MANIFEST)

    with ThreadPoolExecutor(16) as pool:  # an object store takes its time for each
        return {name: manifest for name, manifest, counts in pool.map(read, steps(directory)) if counts}


def remove(directory: Place, name: str) -> None:
    """Remove a checkpoint so that no moment leaves half of it under its name."""
    step = directory / name
    if step.local is None:
        step.remove(MANIFEST)
        step.remove()
        return
    gone = step.local.with_name(f"{name}.gone.tmp")
    LocalPlace(gone).remove()
    os.rename(step.local, gone)
    sync(gone.parent)
    LocalPlace(gone).remove()


def clean(directory: Place) -> list[str]:
    """Remove what interrupted saves left, and return its names. No other run may be writing there."""
    removed = []
    for name in directory.names():
        if directory.local is not None:
            left_over = bool(_LEFT_OVER.fullmatch(name))
            if left_over and name.endswith(_OLD) and not (directory.local / name.removesuffix(_OLD)).exists():
                os.rename(directory.local / name, directory.local / name.removesuffix(_OLD))  # interrupted between two renamings
                continue
        else:
            left_over = bool(_STEP.fullmatch(name)) and not (directory / name).has(MANIFEST)
        if left_over:
            with contextlib.suppress(OSError):
                link = directory.local is not None and (directory.local / name).is_symlink()
                directory.remove(name) if link else (directory / name).remove()
                removed.append(name)
    return removed


def discard(directory: Place, name: str) -> None:
    """Give back the space of a draft."""
    with contextlib.suppress(OSError):
        if directory.local is None:
            remove(directory, name)
        else:
            (directory / f"{name}.tmp").remove()


def _number(name: str) -> int:
    return int(name.partition("-")[2])
