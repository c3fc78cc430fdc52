"""Where what can be made again is kept."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Of all programs of this user (XDG Base Directory Specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def cache_dir() -> Path:
    """fw's own: ``$FW_CACHE``, else fw under the user's."""
    given = os.environ.get("FW_CACHE")
    return Path(given) if given else user_cache() / "fw"
