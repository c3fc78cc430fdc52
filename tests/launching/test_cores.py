"""How many threads a rank has: by affinity, by control groups, by who asks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fw.kernels import cores as processors
from fw.kernels.cores import cores, quota
from fw.launching import cores as shared
from fw.launching.cores import threads_of_rank, usable_cores


@pytest.fixture
def groups(tmp_path: Path):
    def made(own: str, **files: str) -> float | None:
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            file = tmp_path / "mount" / name.replace("__", "/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return quota(tmp_path / "mount", tmp_path / "own")

    return made


def test_no_group_limits(groups):
    assert groups("0::/\n") is None
    assert groups("0::/a\n", **{"cpu.max": "max 100000\n"}) is None
    assert groups("3:cpuacct,cpu:/a\n1:name=systemd:/\n", **{"cpu__cpu.cfs_quota_us": "-1\n", "cpu__cpu.cfs_period_us": "100000\n"}) is None


def test_the_least_of_the_groups_above_counts(groups):
    limits = {"cpu.max": "800000 100000\n", "a__cpu.max": "150000 100000\n", "a__b__cpu.max": "max 100000\n"}
    assert groups("0::/a/b\n", **limits) == 1.5
    assert groups("0::/of/the/host\n") == 8  # a container's own


def test_groups_of_the_first_version(groups):
    assert groups("4:cpu,cpuacct:/a\n0::/\n", **{"cpu__a__cpu.cfs_quota_us": "250000\n", "cpu__a__cpu.cfs_period_us": "100000\n"}) == 2.5


def test_a_quota_and_the_affinity_limit_what_is_usable(monkeypatch):
    monkeypatch.setattr(shared, "cores", lambda: frozenset(range(8)))
    for most, usable in ((None, 8), (16.0, 8), (2.5, 2), (0.5, 1)):
        monkeypatch.setattr(shared, "quota", lambda most=most: most)
        assert usable_cores() == usable


@pytest.mark.parametrize(
    ("ranks", "asked", "named", "own", "threads"),
    [
        (4, 3, "5", 8, 3),  # asked for
        (4, None, "5", 8, 5),  # the environment's
        (4, None, "3,2", 8, 3),
        (4, None, None, 8, 2),
        (16, None, None, 8, 1),
        (1, None, None, 4, 4),  # torch leaves out halves of cores
        (1, None, None, 16, 8),  # more than the process may use
        (1, None, "16", 12, 12),  # set by hand in this process
        (1, None, None, None, 8),
        (2, None, "0", None, 4),  # says nothing
    ],
)
def test_threads_of_a_rank(ranks, asked, named, own, threads, monkeypatch):
    monkeypatch.setattr(shared, "usable_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if named is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", named)
    assert threads_of_rank(ranks, asked, own) == threads


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="a system without affinity")
def test_where_openmp_binds_the_process_has_more_than_the_thread_that_asks(monkeypatch):
    whole = frozenset(os.sched_getaffinity(0))
    monkeypatch.setattr(processors, "_AT_FIRST", frozenset([1000]))
    for name in processors._BINDING:
        monkeypatch.delenv(name, raising=False)
    assert cores() == whole
    monkeypatch.setenv("OMP_PROC_BIND", "false")
    assert cores() == whole
    monkeypatch.setenv("OMP_PROC_BIND", "close")
    assert cores() == whole | {1000}
