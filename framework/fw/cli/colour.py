"""Whether what is printed may be coloured."""

from __future__ import annotations

import os
import sys


def wanted() -> bool:
    """On a terminal, unless ``NO_COLOR`` is set to something (https://no-color.org) or ``TERM`` is ``dumb``."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
