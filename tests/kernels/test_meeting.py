"""Ranks that meet in memory: sums and gathered tensors, in any number of ranks, by threads and by processes."""

from __future__ import annotations

import mmap
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fw.kernels import meeting
from fw.kernels.meeting import Meeting

pytestmark = pytest.mark.skipif(not meeting.available(), reason="no compiler")


def met(ranks: int, what):
    """What each rank, a thread, makes of its meeting."""
    memory = mmap.mmap(-1, meeting.memory_bytes(ranks))
    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(what, [Meeting(memory, rank, ranks) for rank in range(ranks)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_sums(ranks, dtype):
    shapes = [(1,), (17,), (3, 1024), (5, 40000), (1, 64), (2, 7, 9)]
    generator = torch.Generator().manual_seed(ranks)
    given = [[torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(ranks)]

    def sums(at: Meeting) -> list[torch.Tensor]:
        return [at.add_up(x.clone()) for _ in range(20) for x in given[at.rank]]

    found = met(ranks, sums)
    for number, shape in enumerate(shapes):
        in_order = torch.zeros(shape)
        for those in given:
            in_order = in_order + those[number].float()
        for results in found:
            assert all(torch.equal(each, in_order.to(dtype)) for each in results[number :: len(shapes)])


def test_a_tensor_that_is_not_contiguous():
    found = met(2, lambda at: at.add_up(torch.arange(6.0).view(2, 3).t()))
    assert all(torch.equal(each, 2 * torch.arange(6.0).view(2, 3).t()) for each in found)


@pytest.mark.parametrize("shape", [(1, 5), (4, 16001), (3, 70000)])
def test_gathered(shape):
    def gathered(at: Meeting) -> list[torch.Tensor]:
        return [at.gather(torch.full(shape, float(at.rank + 10 * turn))) for turn in range(10)]

    first, *others = met(3, gathered)
    for turn, x in enumerate(first):
        assert torch.equal(x, torch.stack([torch.full(shape, float(rank + 10 * turn)) for rank in range(3)]))
    assert all(torch.equal(x, torch.full(shape, float(rank + 10 * turn))) for rank, xs in enumerate(others, 1) for turn, x in enumerate(xs))


def test_who_waits_hears_of_the_end():
    memory = mmap.mmap(-1, meeting.memory_bytes(2))
    one, other = Meeting(memory, 0, 2), Meeting(memory, 1, 2)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(one.add_up, torch.ones(4))
        assert not one.ended
        other.end()
        waiting.result(60)
    assert one.ended and other.ended
    one.add_up(torch.ones(4))  # waits for nobody


def test_processes():
    memory = mmap.mmap(-1, meeting.memory_bytes(2))
    child = os.fork()
    if not child:
        at = Meeting(memory, 1, 2)
        right = all(at.add_up(torch.full((3000,), 2.0)).eq(turn + 2).all() for turn in range(500))
        os._exit(0 if right else 3)
    at = Meeting(memory, 0, 2)
    try:
        assert all(at.add_up(torch.full((3000,), float(turn))).eq(turn + 2).all() for turn in range(500))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
