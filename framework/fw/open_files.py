"""How many files a process may have open."""

from __future__ import annotations

import resource


def allow_open_files() -> None:
    """As many as the system lets this process have: what is offloaded takes up to three for a parameter, and one for each tensor that a
    block keeps; 1024 are soon used up."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
