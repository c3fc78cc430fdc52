"""What a run was made with, besides its config: a line for each start, so that it can be repeated, or told why it cannot; and one for how
each start ended.

Beside the lines lies what no commit has: the difference of the work tree from it, and the files that registered plugins.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from datetime import datetime, timezone
from email import message_from_string
from pathlib import Path
from typing import Any

import torch

from fw import __version__
from fw.checkpointing.weights_digest import sampled_digest
from fw.config import PLUGINS
from fw.recipe import Recipe

_VARIABLES = ("CUDA_", "NCCL_", "GLOO_", "OMP_", "MKL_", "TORCH_", "PYTORCH_", "CUBLAS_", "FW_", "SLURM_JOB_ID", "WORLD_SIZE", "MALLOC_")
"""Beginnings of the names of what changes how a run computes."""
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSW", "CREDENTIAL", "AUTH")
_IN_ADDRESSES = re.compile(r"://[^/@\s]+@")
FILE = "environment.jsonl"
"""In a run's directory."""
_STARTED = '{"started"'
"""What the line of a start begins with."""
_PATIENCE = 5
"""Seconds for git to answer."""
_LARGEST_PATCH = 1 << 20
_AS_GIT_APPLIES = ("--binary", "--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/")
"""Whatever the user's own settings make of a difference."""


def found(recipe: Recipe, data: str) -> dict[str, Any]:
    """Now, here: command, code, data, versions, host and devices.

    Args:
        data: fingerprint of samples and tokenizer.
    """
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": [without_secrets(word) for word in sys.argv],
        "directory": str(Path.cwd()),
        "git": git(Path.cwd()),
        "fw": {"version": __version__, "git": _own()},
        "seed": recipe.train.seed,
        "ranks": recipe.world_size,
        "data": data,
        "weights": weights(recipe.model.weights),
        "python": platform.python_version(),
        "torch": {"version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads(), **_of_cuda()},
        "packages": packages(),
        "host": host(),
        "devices": devices(),
        "environment": variables(),
    }


def note(directory: Path, recipe: Recipe, data: str) -> None:
    """Add this start to ``environment.jsonl``, and put beside it what no commit has."""
    start = found(recipe, data)
    start["patch"] = _keep_patch(directory)
    start["plugin_files"] = _keep_plugins(directory, recipe)
    _add(directory, start)


def note_end(directory: Path, before: str | None, exit_code: int, said: str = "") -> None:
    """Add how the last start ended, where that is not the one of ``before`` (:func:`last_start`), which is somebody else's.

    Args:
        said: what went wrong, in a sentence; empty where nothing did.
    """
    if last_start(directory) in (None, before):
        return
    ended = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with suppress(OSError):  # what is to be said is how the run ended
        _add(directory, {"ended": ended, "exit_code": exit_code, **({"said": without_secrets(said)} if said else {})})


def last_start(directory: Path) -> str | None:
    """The line of the last start that was noted; None where there is none."""
    try:
        lines = (directory / FILE).read_text().splitlines()
    except (OSError, ValueError):
        return None
    return next((line for line in reversed(lines) if line.startswith(_STARTED)), None)


def _add(directory: Path, line: dict[str, Any]) -> None:
    with (directory / FILE).open("a") as file:
        file.write(json.dumps(line) + "\n")


def last_end(directory: Path) -> dict[str, Any] | None:
    """How the last start ended; None where nobody was there to say so, or no start was noted."""
    try:
        lines = (directory / FILE).read_text().splitlines()
        last = json.loads(lines[-1]) if lines else {}
    except (OSError, ValueError):
        return None
    return last if isinstance(last, dict) and "ended" in last else None


def _keep_patch(directory: Path) -> str | None:
    """Name of a file with what the work tree has that its commit has not; None where that is nothing, no tree, or more than a MiB."""
    patch = _git_bytes(Path.cwd(), "diff", "HEAD", *_AS_GIT_APPLIES)
    return _kept(directory, "changes", ".patch", patch) if patch and len(patch) <= _LARGEST_PATCH else None


def _keep_plugins(directory: Path, recipe: Recipe) -> dict[str, str]:
    """By the path in the config, the name of a copy."""
    given = recipe.config.tree.get(PLUGINS) or []
    kept = {}
    for file in [given] if isinstance(given, str) else given:
        source = Path(file).expanduser()
        with suppress(OSError):
            if name := _kept(directory, source.stem, ".py", source.read_bytes()):
                kept[str(file)] = name
    return kept


def _kept(directory: Path, stem: str, suffix: str, content: bytes) -> str | None:
    """A file for its owner alone, whose name says what it holds; None where it cannot be written."""
    name = f"{stem}-{hashlib.sha256(content).hexdigest()[:12]}{suffix}"
    try:
        descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    except OSError:
        return None
    return name


def weights(directory: Path | None) -> dict[str, Any] | None:
    """Where training begins from, and a digest of the files' names and sizes and of parts of every tensor; None for initial values."""
    if directory is None:
        return None
    return {"path": str(directory), "sha256_of_parts": sampled_digest(directory)}


def _of_cuda() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {}
    driver = Path("/proc/driver/nvidia/version")
    return {
        "driver": driver.read_text().splitlines()[0] if driver.is_file() else None,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": list(torch.cuda.nccl.version()) if torch.distributed.is_nccl_available() else None,
    }


def without_secrets(text: str) -> str:
    """Without who signs in, and how, in addresses."""
    return _IN_ADDRESSES.sub("://…@", text)


def _own() -> dict[str, Any] | None:
    """Of fw's code, where that is in a work tree of its own, and not in an environment that is in somebody's."""
    file = Path(__file__)
    return git(file.parent) if _git(file.parent, "ls-files", "--error-unmatch", file.name) is not None else None


def git(directory: Path) -> dict[str, Any] | None:
    """Commit of the work tree that a directory is in, and whether anything in it is not committed; None where there is none, or no git."""
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _git(directory, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "changed": None if changed is None else bool(changed)}


def _git(directory: Path, *words: str) -> str | None:
    found = _git_bytes(directory, *words)
    return None if found is None else found.decode(errors="replace").strip()


def _git_bytes(directory: Path, *words: str) -> bytes | None:
    try:
        done = subprocess.run(["git", "-C", str(directory), *words], capture_output=True, timeout=_PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def packages() -> dict[str, str]:
    """Versions of all that is installed, by name."""
    every = dict(_name_and_version(each) for each in importlib.metadata.distributions())
    every.pop("", None)
    return dict(sorted(every.items(), key=lambda item: item[0].lower()))


def _name_and_version(installed: importlib.metadata.Distribution) -> tuple[str, str]:
    """Of its headers only: what follows is the package's README."""
    headers = (installed.read_text("METADATA") or installed.read_text("PKG-INFO") or "").partition("\n\n")[0]
    said = message_from_string(headers)
    return str(said.get("Name", "")), str(said.get("Version", ""))


def host() -> dict[str, Any]:
    """Name, system, processor, memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None
    return {
        "name": platform.node(),
        "system": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_bytes": memory,
    }


def processor() -> str:
    """As the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def devices() -> list[dict[str, Any]]:
    """GPUs of this host that torch sees."""
    if not torch.cuda.is_available():
        return []
    every = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return [{"name": each.name, "memory_bytes": each.total_memory, "capability": [each.major, each.minor]} for each in every]


def variables() -> dict[str, str]:
    """Of the environment, what computing depends on; nothing that looks like a secret."""
    return {
        name: without_secrets(value)
        for name, value in sorted(os.environ.items())
        if name.startswith(_VARIABLES) and not any(part in name for part in _SECRET)
    }
