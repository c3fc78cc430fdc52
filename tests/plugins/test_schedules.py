"""Schedules against numbers computed by hand."""

from __future__ import annotations

import math

import pytest

from fw.errors import UserError
from fw_plugins.schedule.constant import Constant, ConstantConfig
from fw_plugins.schedule.cosine import Cosine, CosineConfig
from fw_plugins.schedule.linear import Linear, LinearConfig
from fw_plugins.schedule.wsd import WarmupStableDecay, WSDConfig


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Constant(ConstantConfig()), {0: 1, 99: 1, 5000: 1}),
        (Constant(ConstantConfig(warmup_steps=4)), {0: 0.25, 1: 0.5, 3: 1, 4: 1}),
        (Linear(LinearConfig(final=0.0)), {0: 1, 99: 0, 33: 1 - 33 / 99}),
        (Linear(LinearConfig(warmup_steps=10, final=0.5)), {0: 0.1, 9: 1, 10: 1, 99: 0.5, 500: 0.5}),
        (Cosine(CosineConfig(final=0.0)), {0: 1, 99: 0, 33: (1 + math.cos(math.pi / 3)) / 2}),
        (
            Cosine(CosineConfig(warmup_steps=10, final=0.1, total_steps=200)),
            {9: 1, 10: 1, 199: 0.1, 99: 0.1 + 0.9 * (1 + math.cos(math.pi * 89 / 189)) / 2},
        ),
        (
            WarmupStableDecay(WSDConfig(warmup_steps=5, decay_fraction=0.2, final=0.0)),
            {0: 0.2, 4: 1, 79: 1, 80: 0.95, 89: 0.5, 99: 0, 500: 0},
        ),
    ],
)
def test_factors_of_a_run_of_100_steps(schedule, expected):
    for step, factor in expected.items():
        assert schedule.factor(step, 100) == pytest.approx(factor), step


@pytest.mark.parametrize("bad", [lambda: CosineConfig(final=2), lambda: WSDConfig(decay_fraction=0), lambda: LinearConfig(warmup_steps=-1)])
def test_options_out_of_range_are_refused(bad):
    with pytest.raises(UserError, match="schedule"):
        bad()
