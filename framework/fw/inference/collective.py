"""What ranks with parts of a model do together."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_MOST_WAITING = timedelta(hours=1)


class Collective(Protocol):
    """What ranks do together, in the same order."""

    @property
    def repeatable(self) -> bool:
        """Whether a recording of steps has it."""

    def add_up(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x; x itself may become it."""

    def gather(self, x: Tensor) -> Tensor:
        """On the first rank all ranks' x, ``[ranks, …]``; x itself on others."""

    def end(self) -> None:
        """Nobody waits any more for who is gone."""


class Group:
    """By torch's own means: NCCL between GPUs, and Gloo where there is no compiler for :class:`fw.kernels.meeting.Meeting`.

    It is none of the process's default group, which belongs to whoever imports this.

    Args:
        store: a file that is not there, for the ranks to find one another.
    """

    repeatable = False

    def __init__(self, store: str, rank: int, ranks: int, device: torch.device) -> None:
        self._rank, self._ranks = rank, ranks
        meeting = torch._C._distributed_c10d.FileStore(store, ranks)
        self._on_gpus = device.type == "cuda"
        self._group: Any
        if self._on_gpus:
            options = dist.ProcessGroupNCCL.Options()
            self._group = dist.ProcessGroupNCCL(meeting, rank, ranks, options)
        else:
            self._group = dist.ProcessGroupGloo(meeting, rank, ranks, _MOST_WAITING)

    def add_up(self, x: Tensor) -> Tensor:
        """On the CPU in fp32 and in the order of the ranks, so that a row's sum does not depend on where it stands."""
        x = x.contiguous()
        if self._on_gpus:
            self._sum(x)
            return x
        first, *others = self._of_all(x)
        total = first.float()
        for other in others:
            total += other
        return total.to(x.dtype)

    def gather(self, x: Tensor) -> Tensor:
        """Every rank gets them; few are asked for."""
        found = self._of_all(x.contiguous())
        return x if self._rank else torch.stack(found)

    def end(self) -> None:
        """Gloo sees it by itself."""
        if self._on_gpus:
            self._group.abort()

    def _sum(self, x: Tensor) -> None:
        self._group.allreduce([x]).wait()

    def _of_all(self, x: Tensor) -> list[Tensor]:
        found = [torch.empty_like(x) for _ in range(self._ranks)]
        self._group.allgather([found], [x]).wait()
        return found
