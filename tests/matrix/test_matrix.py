"""Rows in which every pair is, and what is concluded from them."""

from __future__ import annotations

import random

import pytest

from fw.support.matrix import Matrix, Refusal, Runs
from matrix.covering import all_pairs, cover, pairs_of


@pytest.mark.parametrize("seed", range(5))
def test_rows_have_every_pair_that_can_be(seed):
    chance = random.Random(seed)
    parts = {f"part{n}": [f"{n}.{m}" for m in range(chance.randint(2, 6))] for n in range(chance.randint(3, 7))}
    pairs = sorted(map(sorted, all_pairs(parts)))
    impossible = {frozenset(map(tuple, pair)) for pair in chance.sample(pairs, 3)}
    rows = cover(parts, impossible, seed=seed)
    seen = {pair for row in rows for pair in pairs_of(row)}
    assert seen == all_pairs(parts) - impossible
    sizes = sorted(map(len, parts.values()))
    assert sizes[-1] * sizes[-2] - 3 <= len(rows) <= 3 * sizes[-1] * sizes[-2]


def test_what_cannot_be_in_any_row_is_said():
    parts = {"a": ["1"], "b": ["1", "2"], "c": ["1"]}
    with pytest.raises(ValueError, match="no row with"):
        cover(parts, {frozenset([("a", "1"), ("c", "1")])})


def test_statuses():
    training = Runs(
        {"a": ["1", "2"], "b": ["1", "2"]},
        [{"a": "1", "b": "1"}, {"a": "1", "b": "2"}],
        [Refusal(frozenset([("a", "2"), ("b", "1")]), "no")],
    )
    matrix = Matrix(training, Runs({"a": ["1"], "c": ["1"]}, [], []))
    assert matrix.status(("a", "1"), ("b", "2")) == "proven"
    assert matrix.status(("b", "1"), ("a", "2")) == "refused" and matrix.refusal(("b", "1"), ("a", "2")) == "no"
    assert matrix.status(("a", "2"), ("b", "2")) == matrix.status(("a", "1"), ("c", "1")) == "untested"
    assert matrix.status(("b", "1"), ("c", "1")) == matrix.status(("a", "2"), ("c", "1")) == "independent"
