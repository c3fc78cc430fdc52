"""How ranks share the processors of this host."""

from __future__ import annotations

import os

from fw.kernels.cores import cores, quota


def usable_cores() -> int:
    """How many this process may use: those of its affinity, and no more than the time that its control groups give it; at least one."""
    most = quota()
    return len(cores()) if most is None else max(1, min(len(cores()), int(most)))


def threads_of_rank(ranks: int, asked: int | None, own: int | None = None) -> int:
    """CPU threads of each of so many ranks on this host: what was asked for, else OMP_NUM_THREADS, else its share of :func:`usable_cores`.

    Args:
        asked: ``launch.threads``.
        own: how many torch has by itself in this process: of a single rank no more than these. It reads OMP_NUM_THREADS, and leaves out
            cores that are halves of others.
    """
    if asked:
        return asked
    named = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # then come those of threads within threads
    if named.isdecimal() and int(named):
        return own if own and ranks == 1 else int(named)
    share = max(1, usable_cores() // ranks)
    return min(own, share) if own and ranks == 1 else share
