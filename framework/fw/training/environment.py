"""What a run was made with, besides its config: a line for each start, so that it can be repeated, or told why it cannot."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from fw import __version__

_VARIABLES = ("CUDA_", "NCCL_", "GLOO_", "OMP_", "MKL_", "TORCH_", "PYTORCH_", "CUBLAS_", "FW_", "SLURM_JOB_ID", "WORLD_SIZE", "MALLOC_")
"""Beginnings of the names of what changes how a run computes."""
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSW", "CREDENTIAL", "AUTH")
_IN_ADDRESSES = re.compile(r"://[^/@\s]+@")
FILE = "environment.jsonl"
"""In a run's directory."""
_PATIENCE = 5
"""Seconds for git to answer."""


def found(ranks: int, seed: int) -> dict[str, Any]:
    """Now, here: command, code, versions, host and devices."""
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": [without_secrets(word) for word in sys.argv],
        "directory": str(Path.cwd()),
        "git": git(Path.cwd()),
        "fw": {"version": __version__, "git": _own()},
        "seed": seed,
        "ranks": ranks,
        "python": platform.python_version(),
        "torch": {"version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads()},
        "packages": packages(),
        "host": host(),
        "devices": devices(),
        "environment": variables(),
    }


def note(directory: Path, ranks: int, seed: int) -> None:
    """Add this start to ``environment.jsonl``."""
    with (directory / FILE).open("a") as file:
        file.write(json.dumps(found(ranks, seed)) + "\n")


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
    try:
        done = subprocess.run(["git", "-C", str(directory), *words], capture_output=True, text=True, timeout=_PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def packages() -> dict[str, str]:
    """Versions of all that is installed, by name."""
    every = {str(each.metadata["Name"]): each.version for each in importlib.metadata.distributions() if each.metadata["Name"]}
    return dict(sorted(every.items(), key=lambda item: item[0].lower()))


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
