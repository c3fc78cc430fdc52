"""How a step divides into micro-batches: by hand, and what holds of any lengths."""

from __future__ import annotations

import numpy as np
import pytest

from fw.training.micro_batches import Limit, Padding, divide


def lists(dealt):
    return [[group.tolist() for group in groups] for groups in dealt]


def test_by_hand():
    """12 tokens. 8 alone, then two of 5 (10 tokens), then three of 2 (6). Two replicas want a fourth, and with 8 tokens there are four: 8,
    5, 5 and three of 2. The dearest two run together, and who had the dearest gets the cheapest next."""
    lengths = np.array([2, 5, 8, 5, 2, 2])
    assert lists(divide(lengths, Limit(tokens=12), 1)) == [[[1, 3], [2], [0, 4, 5]]]
    assert lists(divide(lengths, Limit(tokens=12), 2)) == [[[2], [3]], [[0, 4, 5], [1]]]
    assert lists(divide(lengths, Limit(rows=2), 1)) == [[[2, 1], [3, 0], [4, 5]]]


def test_one_length_keeps_its_order_and_is_spread_evenly():
    assert lists(divide(np.full(8, 4), Limit(rows=2), 2)) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert lists(divide(np.full(8, 4), Limit(tokens=15), 1)) == [[[0, 1, 2], [3, 4, 5], [6, 7]]]
    assert lists(divide(np.full(8, 4), Limit(tokens=31), 1)) == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    assert lists(divide(np.full(3, 4), Limit(tokens=4), 2)) == [[[0], [1]], [[2], []]]
    assert lists(divide(np.full(0, 4), Limit(tokens=4), 2)) == [[], []]


@pytest.mark.parametrize("seed", range(60))
def test_every_sample_once_within_the_limit_and_equally_many_for_each(seed):
    chance = np.random.default_rng(seed)
    replicas = int(chance.integers(1, 6))
    lengths = Padding(8, 120).padded(np.minimum(chance.geometric(0.04, int(chance.integers(1, 90))), 120))
    tokens = int(chance.integers(120, 700))
    dealt = divide(lengths, Limit(tokens=tokens), replicas)
    assert len(dealt) == replicas and len({len(groups) for groups in dealt}) == 1
    everything = [group for groups in dealt for group in groups]
    assert sorted(np.concatenate(everything).tolist()) == list(range(len(lengths)))
    cost = np.array([[len(group) * lengths[group].max() if len(group) else 0 for group in groups] for groups in dealt])
    assert cost.max() <= tokens
    least = -(-int(lengths.sum()) // tokens)  # no cut has fewer
    assert least <= cost.size <= 2 * least + replicas
    assert cost[0, 0] == cost.max()
    assert (cost.max(0)[:-1] >= cost.max(0)[1:]).all(), "the largest come first"
    if len(lengths) >= 4 * replicas:
        assert (cost > 0).all() or cost.size > len(lengths) - replicas, "no replica is idle while samples could be shared"
    again = divide(lengths.copy(), Limit(tokens=tokens), replicas)
    assert lists(again) == lists(dealt)


def test_replicas_get_like_amounts_of_work():
    chance = np.random.default_rng(0)
    for _ in range(20):
        lengths = np.minimum(chance.geometric(0.01, 256), 1024)
        work = [sum(len(g) * int(lengths[g].max()) for g in groups) for groups in divide(lengths, Limit(tokens=2048), 4)]
        assert max(work) < 1.1 * min(work), work
