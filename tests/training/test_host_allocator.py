"""That freed memory is kept shows in the page faults the kernel counts, not in time."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource, sys, torch
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: where huge pages are given to all, a fault brings 512 of those counted here
from fw.training.host_allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def faults(steps):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        # larger than glibc's own moving threshold ever gets at first, as activations are, and than the largest that may be given, as
        # gradients of embeddings are
        kept = [torch.ones(5 * 2**20) for _ in range(4)] + [torch.ones(20 * 2**20)]
        del kept
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(5)
print(faults(10))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_a_step_gets_the_pages_of_the_one_before():
    # By default glibc learns what to keep from what was freed, and where that lies; a threshold that is given stays until it is changed.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}

    def faults(mode: str) -> int:
        return int(subprocess.run([sys.executable, "-c", PROGRAM, mode], check=True, capture_output=True, text=True, env=env).stdout)

    by_default, kept = faults("default"), faults("keep")
    assert by_default > 10_000 and kept < by_default / 10, (by_default, kept)
