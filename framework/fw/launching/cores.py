"""Processors of this host."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """How many this process may use; where the system does not say, all there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
