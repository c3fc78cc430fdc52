"""Where ranks that torchrun or srun has started meet, before they are a process group and after."""

from __future__ import annotations

import os
from collections import Counter
from datetime import timedelta

import torch.distributed as dist

from fw.errors import PeerError, UserError

_store: dist.Store | None = None  # type: ignore[name-defined]
"""Where they have met: kept for the life of the process, which is rank 0's the life of what holds it."""
_run = 0
_counts: Counter[str] = Counter()


def next_run() -> None:
    """Another run begins in this process, as in all: what earlier ones met for is of no account, however far each rank came with them."""
    global _run
    _run += 1
    _counts.clear()


def group_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:  # type: ignore[name-defined]
    """What the next process group of this process meets in. Each has its own part of one store, as an earlier one leaves its addresses.

    Raises:
        UserError: the environment does not say where rank 0 is.
        DistError: the others have not come within the time.
    """
    return _next("group", rank, world_size, timeout)


def _next(what: str, rank: int, world_size: int, timeout: timedelta) -> dist.Store:  # type: ignore[name-defined]
    """The next part of the store for ``what``, for which all ranks ask in the same order."""
    global _store
    check_address()
    if _store is None:
        _store = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))[0]  # type: ignore[attr-defined]
    _store.set_timeout(timeout)
    _counts[what] += 1
    # torchrun keeps the store from attempt to attempt, and counts these alike on one host only (docs/launch.md).
    is_one_host = world_size <= int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_one_host else "0"
    return dist.PrefixStore(f"fw-{what}-{attempt}-{_run}-{_counts[what]}", _store)  # type: ignore[attr-defined]


def check_address() -> None:
    """See that the environment of a rank says where rank 0 is.

    Raises:
        UserError: it does not.
    """
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise UserError(f"environment: RANK and WORLD_SIZE are set, but {missing[0]} is not; start ranks with fw, torchrun or srun")


def told(own: str | None, rank: int, world_size: int, timeout: timedelta) -> str:
    """What rank 0 tells all: ``own`` there, None on the others. Nobody needs to be in a process group.

    Raises:
        UserError: the environment does not say where rank 0 is.
        PeerError: rank 0 has told nothing within the time.
    """
    try:
        said = _next("told", rank, world_size, timeout)
        if own is not None:
            said.set("first", own)
            return own
        said.wait(["first"], timeout)
        return str(said.get("first").decode())
    except dist.DistError as error:
        raise PeerError(f"rank 0 has told nothing in {timeout.total_seconds():.0f} s ({str(error).splitlines()[0]})") from error
