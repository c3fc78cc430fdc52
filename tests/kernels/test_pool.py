"""Threads that kernels share: whatever their number, and whoever calls, each piece is done once."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fw.kernels import linear
from fw.kernels.build import NotCompiled, library, set_threads, with_threads
from fw.kernels.threads import alone


@pytest.fixture
def threads():
    try:
        given = library().fw_threads
    except NotCompiled as reason:
        pytest.skip(str(reason))
    yield lambda count: given(ctypes.c_long(count))
    given(ctypes.c_long(torch.get_num_threads()))


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return linear.PackedLinear(torch.nn.Linear(512, 4096, bias=False).bfloat16().requires_grad_(False))


def test_any_number_of_threads(threads, layer):
    x = torch.randn(5, 512).bfloat16()
    threads(1)
    right = layer(x)
    for count in (2, 9, 3, 1, 4):
        threads(count)
        for _ in range(200):
            assert torch.equal(layer(x), right)


def test_several_callers_at_once(threads, layer):
    threads(3)
    xs = torch.randn(6, 40, 512).bfloat16()
    right = [layer(x) for x in xs]

    def often(number: int) -> bool:
        return all(torch.equal(layer(xs[number]), right[number]) for _ in range(100))

    with ThreadPoolExecutor(6) as callers:
        assert all(callers.map(often, range(6)))


def test_a_child_has_threads_of_its_own(threads, layer):
    threads(2)
    x = torch.randn(5, 512).bfloat16()
    right = layer(x)
    child = os.fork()
    if not child:
        os._exit(0 if all(torch.equal(layer(x), right) for _ in range(50)) else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(layer(x), right)


def test_counted_while_torch_works_alone(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    library.cache_clear()
    try:
        with alone(), alone():
            assert torch.get_num_threads() == 1
            assert library().fw_thread_count() == 3
        threads(2)
        assert library() is library(*()) and library().fw_thread_count() == 2
    finally:
        torch.set_num_threads(before)
        library.cache_clear()


def test_torch_works_alone():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with alone():
            assert torch.get_num_threads() == 1
            with ThreadPoolExecutor(1) as other:
                assert other.submit(torch.get_num_threads).result() == 2
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_torchs_threads_are_followed(threads, layer):
    before = torch.get_num_threads()
    x = torch.randn(5, 512).bfloat16()
    try:
        for count in (3, 2, 5):
            torch.set_num_threads(count)
            layer(x)
            assert library().fw_thread_count() == count
        with with_threads(4):
            layer(x)
            with ThreadPoolExecutor(1) as other:
                other.submit(layer, x).result()
            assert library().fw_thread_count() == 4  # torch's are what they were
        layer(x)
        assert library().fw_thread_count() == 5
        set_threads(2)
        assert library().fw_thread_count() == torch.get_num_threads() == 2
    finally:
        set_threads(before)


WHERE = """
import os, torch
torch.set_num_threads(2)
torch.ones(1 << 20).add_(1)  # from here on OpenMP keeps this thread on one processor
from fw.kernels.linear import PackedLinear
before = set(os.listdir("/proc/self/task"))
own = os.sched_getaffinity(0)
layer = PackedLinear(torch.nn.Linear(512, 4096, bias=False).bfloat16().requires_grad_(False))
layer(torch.ones(5, 512).bfloat16())
(other,) = set(os.listdir("/proc/self/task")) - before
said = next(line for line in open(f"/proc/self/task/{other}/status") if line.startswith("Cpus_allowed_list"))
print(len(own), said.split()[1])
"""


@pytest.mark.parametrize("binds", ["true", "close", "spread"])
def test_where_openmp_keeps_threads_on_processors_ours_are_not_all_on_one(binds, threads):
    usable = sorted(os.sched_getaffinity(0))
    if usable != list(range(len(usable))) or len(usable) < 2:
        pytest.skip("fewer than two processors, or not the first ones")
    done = subprocess.run(
        [sys.executable, "-c", WHERE],
        env={**os.environ, "OMP_PROC_BIND": binds, "OMP_NUM_THREADS": "2", "FW_TESTS_COLD": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["1", f"{usable[0]}-{usable[-1]}"]
