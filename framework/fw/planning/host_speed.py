"""How fast this machine's processors compute, measured in a second or two: what a GPU's data sheet says, for the CPU.

Nothing of a model is in it: products of square matrices, sums of long vectors, operators on next to nothing, bytes through a socket.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fw.kernels.fp32_products import multiplied
from fw.kernels.threads import of_torch
from fw.launching.cores import threads_of_rank
from fw.recipe import Recipe

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WIDTH = 1024
_LONG = 4 * 2**20
_SENT = 32 * 2**20
_TIMES = 3


@dataclass(frozen=True)
class HostSpeed:
    """Of a rank's threads; rates are per second.

    Attributes:
        peak_flops: of products by dtype.
        memory_bandwidth: read and written by an operator that does nothing else, its result in memory of its own.
        link_bandwidth: between two processes of this host.
        operator_seconds: of an operator on next to nothing, with what Python and autograd do for it.
    """

    peak_flops: Mapping[str, float]
    memory_bandwidth: float
    link_bandwidth: float
    operator_seconds: float

    @property
    def network_bandwidth(self) -> float:
        """To other hosts, which nobody has measured: as if they were processes of this one."""
        return self.link_bandwidth

    @property
    def host_bandwidth(self) -> float:
        """Of copies within the host's memory."""
        return self.memory_bandwidth

    @staticmethod
    def measured(threads: int) -> HostSpeed:
        """With so many threads for each rank, by what computes in training."""
        with _threads(threads), torch.no_grad():
            peaks = {name: _flops(dtype) for name, dtype in _DTYPES.items()}
            bandwidth, link = _bandwidth(), _link()
        with _threads(threads):
            return HostSpeed(peaks, bandwidth, link, _operator())


def threads_of(recipe: Recipe) -> int:
    """Of a rank on a CPU: as it trains with."""
    return threads_of_rank(recipe.ranks_per_host, recipe.launch.threads, of_torch())


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _seconds(program: Callable[[], object], times: int = _TIMES) -> float:
    """The median, after one that is not counted."""
    taken = []
    for _ in range(times + 1):
        begin = time.perf_counter()
        program()
        taken.append(time.perf_counter() - begin)
    return median(taken[1:])


def _flops(dtype: torch.dtype) -> float:
    x = torch.ones(_WIDTH, _WIDTH, dtype=dtype)
    begin = time.perf_counter()
    multiplied(x[: _WIDTH // 16], x)
    slow = time.perf_counter() - begin > 0.1  # a dtype that the processor does not have: a part of the product tells it
    rows = _WIDTH // 16 if slow else _WIDTH
    return 2 * rows * _WIDTH**2 / _seconds(lambda: multiplied(x[:rows], x), 1 if slow else _TIMES)


def _bandwidth() -> float:
    x, y = torch.ones(_LONG), torch.ones(_LONG)
    return 3 * x.nbytes / _seconds(lambda: x + y)


def _link() -> float:
    here, there = socket.socketpair()
    sent, received = bytes(_SENT), bytearray(_SENT)

    def receive() -> None:
        view = memoryview(received)
        while view.nbytes:
            view = view[there.recv_into(view) :]

    def exchange() -> None:
        thread = threading.Thread(target=receive)
        thread.start()
        here.sendall(sent)
        thread.join()

    with here, there:
        return _SENT / _seconds(exchange)


def _operator() -> float:
    """Of a small network's forward and backward, divided by its operators."""
    tiny = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(4, 4), nn.LayerNorm(4), nn.SiLU())))
    x = torch.ones(2, 4)

    def step() -> None:
        tiny(x).sum().backward()

    counter = _Counter()
    step()
    with counter:
        step()
    return _seconds(step, 5 * _TIMES) / max(1, counter.number)


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.number += not func.is_view
        return func(*args, **(kwargs or {}))
