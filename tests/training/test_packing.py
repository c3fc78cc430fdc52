"""Packing: a small one by hand, and what holds of any."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fw.kinds.data import IGNORED
from fw.training.packing import PackedRows, assign


class Words:
    """Sample i: the ids 100 · i, 100 · i + 1, …, and as labels the ids that follow."""

    def __init__(self, lengths):
        self.lengths = np.asarray(lengths)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        ids = 100 * index + torch.arange(int(self.lengths[index]) + 1)
        return {"input_ids": ids[:-1], "labels": ids[1:]}


def test_a_small_one_by_hand():
    """Rows of 10, the longest first. 7 opens row 0 (3 left), 6 opens row 1 (4 left). 4 fits best into row 1 and fills it. Of the three 3s
    one fills row 0, and two open row 2 (4 left), where 2 and 1 fit best."""
    assert assign(np.array([3, 7, 2, 6, 3, 4, 3, 1]), 10).tolist() == [0, 0, 2, 1, 2, 1, 2, 2]
    rows = PackedRows(Words([3, 7, 2, 6, 3, 4, 3, 1]), 10)
    assert len(rows) == 3 and rows.packed == 8 and rows.padding == pytest.approx(1 / 30)
    assert [rows.members(row).tolist() for row in range(3)] == [[0, 1], [3, 5], [2, 4, 6, 7]]
    assert rows.lengths_in(2).tolist() == [2, 3, 3, 1]
    row = rows[2]
    assert row["input_ids"].tolist() == [200, 201, 400, 401, 402, 600, 601, 602, 700, 0]
    assert row["labels"].tolist() == [201, 202, 401, 402, 403, 601, 602, 603, 701, IGNORED]
    assert row["segments"].tolist() == [1, 1, 2, 2, 2, 3, 3, 3, 4, 0]
    with pytest.raises(IndexError):
        rows[3]


def one_after_another(lengths, capacity):
    """Best fit, the longest first, in the plainest way: how many rows."""
    room = []
    for length in sorted(lengths, reverse=True):
        fitting = [left for left in room if left >= length]
        if fitting:
            room.remove(min(fitting))
        room.append((min(fitting) if fitting else capacity) - length)
    return len(room)


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_lost_doubled_or_too_long_and_rows_are_those_of_the_plain_algorithm(seed):
    chance = np.random.default_rng(seed)
    capacity = int(chance.integers(1, 200))
    most = int(chance.integers(1, capacity + 1))
    lengths = chance.integers(1, most + 1, int(chance.integers(1, 400)))
    if seed % 3 == 0:
        lengths = np.minimum(chance.geometric(0.03, len(lengths)), capacity)
    row_N = assign(lengths, capacity)
    filled = np.bincount(row_N, weights=lengths)
    assert filled.max() <= capacity and filled.min() > 0
    assert len(filled) == one_after_another(lengths.tolist(), capacity)
    rows = PackedRows(Words(lengths), capacity)
    assert sorted(np.concatenate([rows.members(row) for row in range(len(rows))])) == list(range(len(lengths)))
    found = [label for row in range(len(rows)) for label in rows[row]["labels"].tolist() if label != IGNORED]
    assert sorted(found) == sorted(label for index in range(len(lengths)) for label in rows._samples[index]["labels"].tolist())


@pytest.mark.parametrize("mean", [20, 200, 600])
def test_a_million_samples_take_hardly_more_rows_than_their_tokens_need(mean):
    lengths = np.minimum(np.random.default_rng(0).geometric(1 / mean, 1_000_000), 2048)
    filled = np.bincount(assign(lengths, 2048), weights=lengths)
    assert filled.max() <= 2048 and filled.sum() == lengths.sum()
    assert len(filled) <= 1.002 * -(-lengths.sum() // 2048)


def test_samples_that_hold_several_documents_keep_them_apart():
    class Pairs(Words):
        def __getitem__(self, index):
            sample = super().__getitem__(index)
            segments = torch.ones_like(sample["labels"])
            segments[2:] = 2
            return {**sample, "segments": segments}

    assert PackedRows(Pairs([4, 3]), 9)[0]["segments"].tolist() == [1, 1, 2, 2, 3, 3, 4, 0, 0]
