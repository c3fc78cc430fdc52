"""What holds for every plugin that takes part in training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

import fw
from fw.errors import EXIT_USER
from fw.meter.document import MemoryDocument
from fw.planning.plan import plan
from fw.testing.probe import Probe
from fw.testing.running import Run, Runs, merged, near
from fw.testing.suite import PluginSuite

DDP: dict[str, Any] = {"sharding": "ddp", "launch": {"devices": 2}}
FSDP: dict[str, Any] = {"sharding": "fsdp", "launch": {"devices": 2}}
_NEAR = 0.02


class TrainedSuite(PluginSuite):
    """Small runs with the plugin: planned and measured, resumed, on two ranks, and what the next run sees of it.

    Attributes:
        plan_tolerance: how far the plan's peak may be from the one measured, relative; None where the plugin's memory is not to be planned.
        resume_tolerance: relative, of losses after a resumed step; 0 for the same bits.
    """

    probes: ClassVar[Mapping[str, Probe]] = {"ddp": Probe(DDP), "fsdp": Probe(FSDP)}
    plan_tolerance: ClassVar[float | None] = _NEAR
    resume_tolerance: ClassVar[float] = 0.0

    @pytest.fixture
    def whole(self, runs: Runs) -> Run:
        """A run of it on one rank, without anything else."""
        return runs.train("whole", self.sections).ok()

    def test_its_losses_are_numbers(self, whole: Run) -> None:
        assert len(whole.losses) == 6 and all(map(math.isfinite, whole.losses)), whole.losses

    def test_nothing_of_a_run_is_a_pickle(self, runs: Runs) -> None:
        assert not runs.train("saved", merged(self.sections, {"train": {"save_every": 6}})).ok().pickles()

    def test_memory_is_what_was_planned(self, runs: Runs) -> None:
        if self.plan_tolerance is None:
            pytest.skip("its memory is not planned")
        measured_step = {"memory": {"measure_step": 2}}
        run = runs.train("measured", merged(self.sections, measured_step)).ok()
        measured = MemoryDocument.from_json(run.json("memory.json")).largest
        planned = plan(str(runs.config("planned", self.sections))).largest
        same = planned.allocated_peak == pytest.approx(measured.allocated_peak, rel=self.plan_tolerance)
        assert same, f"planned {planned.most}\nmeasured {measured.most}\n{run.told}"

    def test_a_resumed_run_is_one_that_was_never_stopped(self, runs: Runs, whole: Run) -> None:
        halves = merged(self._halves, {"train": {"max_steps": 3, "save_every": 3}})
        runs.train("halves", halves).ok()
        resumed = runs.train("halves", merged(self._halves, {"resume": "auto"})).ok()
        assert near(resumed.losses, whole.losses, self.resume_tolerance), (resumed.losses, whole.losses)

    def test_a_checkpoint_serves_another_number_of_ranks(self, runs: Runs, whole: Run) -> None:
        if "fsdp" not in self.probes or not self._has("fsdp"):
            pytest.skip("it does not run under fsdp")
        runs.train("one", merged(self._halves, {"train": {"max_steps": 3, "save_every": 3}})).ok()
        resumed = runs.train("one", merged(merged(self._halves, FSDP), {"resume": "auto"})).ok()
        tolerance = self.probes["fsdp"].tolerance
        assert tolerance is None or near(resumed.losses, whole.losses, tolerance), (resumed.losses, whole.losses)

    def test_capabilities(self, runs: Runs, capability: str) -> None:
        """What is declared works, and what is not is refused."""
        probe = self.probes[capability]
        ended = runs.train("with", merged(merged(self.sections, probe.before), probe.sections))
        if not self._has(capability):
            undeclared = f"'{capability}' is not among its capabilities"
            assert ended.code != 0, f"{undeclared}, but works; declare it"
            assert ended.code == EXIT_USER, f"{undeclared}, and should be refused with 2, not end with {ended.code}:\n{ended.told}"
            return
        ended.ok()
        if probe.tolerance is None:
            assert all(map(math.isfinite, ended.losses)), ended.losses
        else:
            without = runs.train("without", merged(self.sections, probe.before)).ok()
            assert near(ended.losses, without.losses, probe.tolerance), (ended.losses, without.losses)

    def test_who_does_not_name_it_sees_nothing_of_it(self, runs: Runs) -> None:
        """Runs of one process: before, with the plugin, and after."""
        losses = []
        for name, sections in (("before", {}), ("with", self.sections), ("after", {})):
            fw.train(str(runs.config(name, sections)))
            losses.append(Run(0, "", runs.directory / name).losses)
        assert losses[0] == losses[2], "a run without the plugin is another after one with it"

    @property
    def _halves(self) -> dict[str, Any]:
        """With a schedule's end that does not depend on when a run stops."""
        return merged(self.sections, {} if self.plugin.kind == "schedule" else {"schedule": {"name": "constant"}})

    def _has(self, capability: str) -> bool:
        return self.capabilities is None or capability in self.capabilities
