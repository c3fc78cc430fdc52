"""Files of a batch: prompts, answers, and beside these a note of what they belong to, until all are there."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from fw.config import PLUGINS
from fw.errors import UserError, describe
from fw.inference.prepare import base_of
from fw.locate import ADAPTER_CONFIG, CONFIG, inside
from fw.recipe.inference import INFERENCE, QUANTIZATION, InferenceRecipe

PROMPTS = "prompts"
"""Under which a note has the digest of these."""
_SHOWN = 60
"""Characters of a value that a refusal shows."""
_SECTIONS = ("kv_cache", QUANTIZATION, PLUGINS)
_OF_A_MODEL = (".safetensors", ".json", ".model", ".jinja")


def circumstances_of(
    recipe: InferenceRecipe, model: str | Path, adapter: str | Path | None, adapters: Mapping[str, str | Path]
) -> dict[str, Any]:
    """What answers of a model depend on, besides its name and what is asked: files, weights as they are read, caches, adapters. How much is
    computed at once, where, and within which memory is left out, so that a batch which did not fit goes on with less.

    Args:
        adapter: directory of the one that is part of the model.
        adapters: directories of those that lines ask for, by name.
    """
    tree, options = recipe.config.tree, recipe.inference
    sections = {name: {"name": tree[name]} if isinstance(tree[name], str) else tree[name] for name in _SECTIONS if name in tree}
    return {
        "files of the model": _files_of(base_of(model)),
        "its adapter": _files_of(own) if (own := _adapter_in(model)) and inside(Path(model), CONFIG) is None else None,
        "adapter": None if adapter is None else _files_of(_adapter_in(adapter) or Path(adapter)),
        **{f"adapters {name}": _files_of(_adapter_in(directory) or Path(directory)) for name, directory in adapters.items()},
        **sections,
        **{f"{INFERENCE}.{name}": getattr(options, name) for name in ("dtype", "weights", "max_context")},
        **({f"{INFERENCE}.batch_invariant": True} if options.batch_invariant else {}),
    }


def _adapter_in(directory: str | Path) -> Path | None:
    return inside(Path(directory), ADAPTER_CONFIG)


def _files_of(directory: Path) -> str:
    """Where they are, and what changes with them: a checkpoint that is called the latest may be another one tomorrow."""
    place = directory.resolve()
    files = sorted(path for path in place.rglob("*") if path.suffix in _OF_A_MODEL and path.is_file())
    seen = [f"{path.relative_to(place)} {(found := path.stat()).st_size} {found.st_mtime_ns}" for path in files]
    return f"{place}, {hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:12]}"


def looked_at(source: Path) -> tuple[int, str]:
    """Lines that are not empty, and a digest of all.

    Raises:
        UserError: there are none, or they cannot be read, or only once.
    """
    digest, count = hashlib.sha256(), 0
    try:
        if not stat.S_ISREG(source.stat().st_mode) and not source.is_dir():
            raise UserError(f"--input: {source} can be read once only, and a batch is read twice; write it to a file and give that")
        with source.open("rb") as file:
            for line in file:
                digest.update(line)
                count += bool(line.strip())
    except OSError as error:
        raise UserError(f"--input: {source} cannot be read: {error.strerror}") from None
    if not count:
        raise UserError(f"--input: {source} has no line")
    return count, digest.hexdigest()


def claimed(target: Path, note: Path, belongs: Mapping[str, Any]) -> TextIO:
    """The note, by which answers are this batch's, and this process's as long as it is open.

    Raises:
        UserError: the answers belong to another batch or process, or to none.
    """
    if not note.exists():
        if target.exists():
            raise UserError(f"--output: {target} exists already; give another file, or remove it")
        try:
            _begin(target, note, belongs)
        except OSError as error:
            raise UserError(f"--output: {target} cannot be written ({describe(error)}); give another file") from None
    try:
        held = note.open()
    except FileNotFoundError:
        raise UserError(_ended(target)) from None
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--output: another process is writing {target}; wait for its end, or give another file") from None
        except OSError:
            pass  # a file system without locks
        if not note.exists() or note.stat().st_ino != os.fstat(held.fileno()).st_ino:
            raise UserError(_ended(target))
        if other := _differing(json.load(held), json.loads(json.dumps(belongs))):
            raise UserError(f"--output: {target} is half of another batch ({'; '.join(other)}); ask as that did, or remove it and {note}")
    except BaseException:
        held.close()
        raise
    return held


def _begin(target: Path, note: Path, belongs: Mapping[str, Any]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = note.with_name(f"{note.name}.{os.getpid()}")
    try:
        aside.write_text(json.dumps(belongs))
        try:
            os.link(aside, note)
        except OSError:  # another one began at once, or a file system has no links
            if not note.exists():
                aside.replace(note)
    finally:
        aside.unlink(missing_ok=True)


def _ended(target: Path) -> str:
    return f"--output: another process has ended writing {target} this moment; look at it, or give another file"


def answered_lines(target: Path, note: Path) -> set[int]:
    """Numbers of the lines that are answered already. One that was being written when a run ended is cut off.

    Raises:
        UserError: a line is no answer.
    """
    if not target.exists():
        return set()
    numbers, whole = set(), 0
    with target.open("rb") as file:
        for place, line in enumerate(file, 1):
            if not line.endswith(b"\n"):  # it was being written when the run ended
                break
            try:
                numbers.add(int(json.loads(line)["line"]))
            except (ValueError, LookupError, TypeError):
                raise UserError(
                    f"--output: line {place} of {target} is no answer of a batch; remove that line, or the file and {note}"
                ) from None
            whole += len(line)
    os.truncate(target, whole)
    return numbers


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In what two batches differ, for a person."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return [
        "other prompts" if name == PROMPTS else f"{name}: {_shown(before.get(name))}, and now {_shown(now.get(name))}" for name in names
    ]


def _shown(value: Any) -> str:
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def lines(source: Path) -> Iterator[tuple[int, str]]:
    """Those that are not empty, by number."""
    with source.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8", errors="surrogateescape")
