"""The order of samples: exact resumption, every sample once per epoch, lengths alike within a step where that is asked for."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from fw.training.order import StepOrder

LENGTHS = np.random.default_rng(0).integers(1, 500, 1003)


def steps(count, samples=13, batch=4, seed=3, start=0, bucketing=0):
    order = StepOrder(samples, batch, seed, start * batch, LENGTHS[:samples], bucketing)
    return [indices.tolist() for indices in islice(order, count)]


@pytest.mark.parametrize("bucketing", [0, 3])
@pytest.mark.parametrize("start", [1, 3, 7, 19])
def test_a_resumed_order_goes_on_where_it_stopped(start, bucketing):
    assert steps(20 - start, start=start, bucketing=bucketing) == steps(20, bucketing=bucketing)[start:]


@pytest.mark.parametrize("bucketing", [0, 1, 2, 5, 100])
def test_each_epoch_shows_every_sample_once_in_another_order(bucketing):
    numbers = [index for step in steps(13, bucketing=bucketing) for index in step]  # 52 numbers: four epochs of 13
    epochs = [numbers[i : i + 13] for i in range(0, 52, 13)]
    assert all(sorted(epoch) == list(range(13)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4 or bucketing == 100  # one window: three steps that change places


def test_the_seed_matters_and_a_batch_may_exceed_the_samples():
    assert steps(5, seed=1) != steps(5, seed=2)
    assert sorted(steps(1, samples=3, batch=6)[0]) == [0, 0, 1, 1, 2, 2]
    assert sorted(steps(1, samples=3, batch=6, bucketing=2)[0]) == [0, 0, 1, 1, 2, 2]


def test_bucketing_moves_samples_inside_their_window_only():
    """A window is 10 steps of 8 samples of the permutation; there every step has neighbours in length, and steps are shuffled."""
    plain, bucketed = (steps(120, 1003, 8, bucketing=bucketing) for bucketing in (0, 10))
    spread = []
    for first in range(0, 120, 10):
        window, moved = (sum(order[first : first + 10], []) for order in (plain, bucketed))
        assert sorted(window) == sorted(moved)
        spread.append(np.mean([np.ptp(LENGTHS[step]) for step in bucketed[first : first + 10]]))
        shortest = [LENGTHS[step].min() for step in bucketed[first : first + 10]]
        assert shortest != sorted(shortest)
    before = np.mean([np.ptp(LENGTHS[step]) for step in plain])
    assert np.mean(spread) < before / 5
    inside = sorted(bucketed[:10], key=lambda step: LENGTHS[step].min())
    assert all(LENGTHS[a].max() <= LENGTHS[b].min() for a, b in zip(inside, inside[1:], strict=False))
