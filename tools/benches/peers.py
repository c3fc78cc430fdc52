"""Programs that are measured beside fw, each by a script in whichever Python has it; and whether the machine is quiet enough for that."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACE = ROOT / ".peers"
"""Where `tools/bench setup-peers` makes environments."""
NOT_INSTALLED = 3
"""Exit code of a script whose program is not there."""
_BUSY = 0.15
_LOOKED_AT_S = 2.0


def pythons() -> list[str]:
    """Of the environments that `tools/bench setup-peers` has made."""
    return [str(python) for python in sorted(PLACE.glob("*/bin/python"))]


def has(python: str, module: str) -> bool:
    """Whether a Python has it."""
    code = f"import sys, importlib.util as u; sys.exit(u.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


def having(module: str, others: Sequence[str]) -> str | None:
    """The first Python that has it, this one before all others."""
    return next((python for python in [sys.executable, *others] if has(python, module)), None)


def printed(way: str, words: Sequence[str], variables: Mapping[str, str] | None = None) -> dict[str, float] | None:
    """What a command prints as JSON on its last line; None where what it needs is not installed. Ends the process where it fails."""
    found = subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ, **(variables or {})})
    if found.returncode == NOT_INSTALLED:
        return None
    if found.returncode:
        sys.exit(f"{way}: {found.stderr.strip()[-2000:]}")
    figures: dict[str, float] = json.loads(found.stdout.splitlines()[-1])
    return figures


class Crashed(Exception):
    """A program was ended by a signal."""


def measured(way: str, script: Path, words: Sequence[str], peers: Sequence[str]) -> dict[str, float] | None:
    """What a script prints; None where no Python has its program. Ends the process where it fails.

    Raises:
        Crashed: it was ended by a signal, which is the program's own fault, and nothing is known of the others.
    """
    for python in [sys.executable, *peers]:
        found = subprocess.run([python, str(script), *words], capture_output=True, text=True, check=False)
        if found.returncode == NOT_INSTALLED:
            continue
        if found.returncode < 0:
            raise Crashed(f"{way}: crashed ({signal.Signals(-found.returncode).name})")
        if found.returncode:
            sys.exit(f"{way}: {found.stderr.strip()[-2000:]}")
        figures: dict[str, float] = json.loads(found.stdout.splitlines()[-1])
        return figures
    return None


def check_quiet() -> None:
    """End the process where others use the processors: what is measured then says nothing."""
    busy = busy_share(_LOOKED_AT_S)
    if busy > _BUSY:
        sys.exit(f"others use {busy:.0%} of this machine's processors; wait for them to end, or measure all the same with --busy")


def busy_share(seconds: float) -> float:
    """Of the processors' time in the next seconds, the part that somebody uses (Linux; 0 elsewhere)."""
    if not Path("/proc/stat").exists():
        return 0.0
    before = _ticks()
    time.sleep(seconds)
    used, all_ = (now - then for now, then in zip(_ticks(), before, strict=True))
    return used / max(1, all_)


def _ticks() -> tuple[int, int]:
    """Used, and all, since the machine began."""
    numbers = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(numbers) - numbers[3] - numbers[4], sum(numbers)


def load() -> float:
    """Processes that ran or waited, on average over a minute."""
    return os.getloadavg()[0]
