"""Tests of schedules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from fw.testing.probe import Probe
from fw.testing.running import Runs, merged, near
from fw.testing.suite import PluginSuite
from fw.testing.trained import DDP


class ScheduleSuite(PluginSuite):
    """A learning rate over time.

    Attributes:
        expected: factors of a run's first steps, where they are known.
        total_steps: of that run.
    """

    expected: ClassVar[Sequence[float]] = ()
    total_steps: ClassVar[int] = 20
    probes: ClassVar[Mapping[str, Probe]] = {}

    def test_factors_are_numbers_and_not_negative(self) -> None:
        made = self.make()
        factors = [made.factor(step, self.total_steps) for step in range(self.total_steps)]
        assert all(math.isfinite(factor) and factor >= 0 for factor in factors), factors
        assert any(factors), "a run of this schedule would learn nothing"

    def test_factors_are_those_expected(self) -> None:
        made = self.make()
        for step, factor in enumerate(self.expected):
            assert math.isclose(made.factor(step, self.total_steps), factor, rel_tol=1e-9, abs_tol=1e-12), step

    def test_a_factor_depends_on_the_step_alone(self) -> None:
        """Asked in any order, of one object or several: there is no state to save."""
        made, steps = self.make(), [7, 0, 19, 3, 7]
        assert [made.factor(step, self.total_steps) for step in steps] == [self.make().factor(step, self.total_steps) for step in steps]

    def test_a_run_has_its_learning_rates_also_when_resumed_on_two_ranks(self, runs: Runs) -> None:
        rate = 0.01
        sections = merged(self.sections, {"optimizer": {"name": "sgd", "lr": rate}})
        first = runs.train("run", merged(sections, {"train": {"save_every": 3}})).ok()
        made = self.make()
        expected = [rate * made.factor(step, 6) for step in range(6)]
        assert near(first.column("lr"), expected, 1e-6), first.told
        third = str(first.directory / "checkpoints" / "step-00000003")
        again = runs.train("again", merged(sections, {**DDP, "resume": third})).ok()
        assert all(math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-12) for a, b in zip(again.column("lr"), expected[3:], strict=True)), (
            again.told
        )
