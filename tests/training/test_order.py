"""The order of samples: the same global batch for any number of ranks, and exact resumption."""

from __future__ import annotations

from itertools import islice

import pytest

from fw.training.order import RankedBatches, StepOrder


def steps(count, ranks, samples=13, batch=4, seed=3, start=0):
    orders = [iter(StepOrder(samples, batch, seed, rank, ranks, start * batch)) for rank in range(ranks)]
    return [sum((next(order) for order in orders), []) for _ in range(count)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_global_batch_does_not_depend_on_the_number_of_ranks(ranks):
    assert steps(20, ranks) == steps(20, 1)


@pytest.mark.parametrize("start", [1, 3, 7, 19])
def test_a_resumed_order_goes_on_where_it_stopped(start):
    assert steps(20 - start, 1, start=start) == steps(20, 1)[start:]


def test_each_epoch_shows_every_sample_once_in_another_order():
    numbers = [index for step in steps(13, 1) for index in step]  # 52 numbers: four epochs of 13
    epochs = [numbers[i : i + 13] for i in range(0, 52, 13)]
    assert all(sorted(epoch) == list(range(13)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_the_seed_matters_and_a_batch_may_exceed_the_samples():
    assert steps(5, 1, seed=1) != steps(5, 1, seed=2)
    assert sorted(steps(1, 2, samples=3, batch=6)[0]) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(("samples", "batch", "ranks"), [(10, 2, 1), (10, 2, 2), (11, 2, 3), (1, 4, 2)])
def test_validation_deals_every_sample_once_and_equally_many_batches_to_each_rank(samples, batch, ranks):
    dealt = [list(RankedBatches(samples, batch, rank, ranks)) for rank in range(ranks)]
    assert len({len(batches) for batches in dealt}) == 1
    assert all(len(indices) == batch for batches in dealt for indices in batches)
    real = sorted(i for batches in dealt for indices in batches for i in indices if i >= 0)
    assert real == list(range(samples))
    assert len(list(islice(RankedBatches(samples, batch, 0, ranks), 100))) == len(RankedBatches(samples, batch, 0, ranks))
