"""ddp's gradients averaged in another dtype: the mean of the ranks' own, one bucket's copy at a time."""

from __future__ import annotations

import pytest

from distributed.ranks import run_ranks


@pytest.mark.parametrize("static_graph", [False, True])
def test_buckets_are_averaged_one_after_another(static_graph: bool) -> None:
    run_ranks("averages.py", 2, static_graph)
