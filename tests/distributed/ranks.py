"""Starts the programs beside this file on several ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from conftest import environment, own_cache

HERE = Path(__file__).parent


def ends(text: str, characters: int = 8000) -> str:
    """Both: of ranks that fail one after another, the first says why."""
    return text if len(text) <= 2 * characters else f"{text[:characters]}\n[…]\n{text[-characters:]}"


def run_ranks(program: str, ranks: int, asked: Any, directory: Path | None = None) -> subprocess.CompletedProcess[str]:
    """``program`` under torchrun (one rank: by itself) with ``asked`` as JSON; a data cache of its own where a directory is given."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    own = {} if directory is None else {"FW_CACHE": own_cache(directory / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *torchrun, str(HERE / program), json.dumps(asked)],
        cwd=directory,
        env={**environment(), **own},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, ends(done.stderr)
    return done
