"""ddp's gradients averaged in another dtype: the mean of the ranks' own, one bucket's copy at a time."""

from __future__ import annotations

from distributed.ranks import run_ranks


def test_buckets_are_averaged_one_after_another() -> None:
    run_ranks("averages.py", 2, None)
