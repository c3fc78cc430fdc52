"""Where a model lies: a directory, a run of fw's own, or a repository of the Hugging Face hub."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from fw.errors import UserError

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_WANTED = ("*.json", "model.safetensors", "model-*.safetensors", "adapter_model*.safetensors", "*.jinja")


def find(where: str | Path, wanted: str = CONFIG) -> Path:
    """The model directory that ``where`` means: itself, the latest checkpoint of a run directory, or a hub repository.

    ``org/name`` or ``org/name@revision`` is downloaded (or found in the hub's cache) where no such directory exists; no pickles.

    Args:
        wanted: the file that a directory is known by.

    Raises:
        UserError: there is no such directory and nothing to download it with, or it does not hold the file.
    """
    path = Path(where).expanduser()
    if found := inside(path, wanted):
        return found
    if path.exists():
        what = "adapter's" if wanted == ADAPTER_CONFIG else "model"
        raise UserError(f"{path} is no {what} directory: it has no {wanted}, nor checkpoints/latest/{wanted}")
    if _REPOSITORY.fullmatch(str(where)):
        return _download(str(where))
    raise UserError(f"{path}: no such directory")


def inside(path: Path, wanted: str) -> Path | None:
    """The directory itself, or the latest checkpoint in it, whichever holds the file."""
    for candidate in (path, path / "latest", path / "checkpoints" / "latest"):
        if (candidate / wanted).is_file():
            return candidate.resolve() if candidate.name == "latest" else candidate
    return None


def settled(where: str | Path, *wanted: str) -> Path:
    """The directory that something is in now: which checkpoint of a run is the latest may change.

    Args:
        wanted: files that it may be known by, the first one's first.

    Raises:
        UserError: as :func:`find` does, of the first.
    """
    path = Path(where).expanduser()
    found = (inside(path, name) for name in wanted)
    return next(filter(None, found), None) or find(where, wanted[0])


def confined(directory: Path, root: Path) -> bool:
    """Whether a directory is below another one, and so is whatever lies right in it: wherever links lead.

    Args:
        root: resolved.
    """
    return all(each.resolve().is_relative_to(root) for each in (directory, *directory.iterdir()))


def _download(name: str) -> Path:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise UserError(f"{name}: no such directory; to take it from the hub, pip install huggingface_hub")
    import huggingface_hub

    if not os.isatty(2):
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
    repository, _, revision = name.partition("@")
    try:
        return Path(huggingface_hub.snapshot_download(repository, revision=revision or None, allow_patterns=list(_WANTED)))
    except Exception as error:  # the hub's client raises errors of many libraries: not found, gated, offline, no space
        raise UserError(f"{name}: no such directory, and the hub gives none ({type(error).__name__}: {_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]
