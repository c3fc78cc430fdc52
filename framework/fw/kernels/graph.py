"""A computation on a GPU that is made once from Python, and again as a CUDA graph: what a tape is on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fw.kernels.tape import NotRepeatable
from fw.planned import planned_gpu


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """That recordings on a GPU are made on, all on one: each has a workspace of cuBLAS. Torch's own is of the GPU that was the first."""
    return torch.cuda.Stream(device)


class Graph:
    """A recording, whose result is in the same tensor each time.

    Args:
        compute: from inputs whose values may differ each time. It has been made before, so that whatever is made but once is there.
        pool: of memory that other recordings, of which one plays at a time, have too.

    Raises:
        NotRepeatable: it waits for the GPU, or does something else that no graph can.
    """

    def __init__(self, compute: Callable[[], Tensor], pool: Any) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None
        if (planned := planned_gpu()) is not None:
            with planned.recording():
                self.result = compute()
            return
        self._graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream()
        try:
            # Other threads may talk to the GPU meanwhile.
            with torch.cuda.graph(self._graph, pool=pool, stream=_stream(before.device), capture_error_mode="thread_local"):
                self.result = compute()
        except RuntimeError as error:
            torch.cuda.set_stream(before)  # torch leaves its own where the end of a capture fails
            torch.cuda.synchronize()
            raise NotRepeatable(f"no CUDA graph holds what it does: {str(error).splitlines()[0]}") from None

    def play(self) -> None:
        """Again, of what is in the inputs now."""
        if self._graph is not None:
            self._graph.replay()
