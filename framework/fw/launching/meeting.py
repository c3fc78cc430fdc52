"""Where ranks that torchrun or srun has started meet, before they are a process group and after."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from fw.errors import PeerError, UserError

_store: dist.Store | None = None  # type: ignore[name-defined]


def met() -> dist.Store | None:  # type: ignore[name-defined]
    """The store in which ranks have met in this process; None where they have not."""
    return _store


def check_address() -> None:
    """See that the environment of a rank says where rank 0 is.

    Raises:
        UserError: it does not.
    """
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise UserError(f"environment: RANK and WORLD_SIZE are set, but {missing[0]} is not; start ranks with fw, torchrun or srun")


def told(own: str | None, rank: int, world_size: int, timeout: timedelta) -> str:
    """What rank 0 tells all: ``own`` there, None on the others. Nobody needs to be in a process group; the store of the first call is kept
    for one.

    Raises:
        UserError: the environment does not say where rank 0 is.
        PeerError: rank 0 has told nothing within the time.
    """
    global _store
    check_address()
    try:
        if _store is None:
            _store = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))[0]  # type: ignore[attr-defined]
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store of torchrun outlives an attempt
        said = dist.PrefixStore(f"fw-told-{attempt}", _store)  # type: ignore[attr-defined]
        if own is not None:
            said.set("first", own)
            return own
        said.wait(["first"], timeout)
        return str(said.get("first").decode())
    except dist.DistError as error:
        raise PeerError(f"rank 0 has told nothing in {timeout.total_seconds():.0f} s ({str(error).splitlines()[0]})") from error
