"""Programs that are measured beside fw, each by a script in whichever Python has it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

NOT_INSTALLED = 3
"""Exit code of a script whose program is not there."""


def measured(way: str, script: Path, words: Sequence[str], peers: Sequence[str]) -> dict[str, float] | None:
    """Figures that the script prints as JSON on its last line; None where no Python has the program. Ends the process where it fails."""
    for python in [sys.executable, *peers]:
        found = subprocess.run([python, str(script), *words], capture_output=True, text=True, check=False)
        if found.returncode == NOT_INSTALLED:
            continue
        if found.returncode:
            sys.exit(f"{way}: {found.stderr.strip()[-2000:]}")
        figures: dict[str, float] = json.loads(found.stdout.splitlines()[-1])
        return figures
    return None
