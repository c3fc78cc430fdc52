"""Tests of how state reaches a disk and comes back."""

from __future__ import annotations

import re

from fw.place import place
from fw.testing.models import small_llama_of, with_values
from fw.testing.running import TINY, Run, Runs, merged, near
from fw.testing.trained import TrainedSuite


class CheckpointSuite(TrainedSuite):
    """How state reaches a disk: what comes back is what went, damage is told, and what is newest is whole."""

    def saved(self, runs: Runs) -> Run:
        """A run with two checkpoints."""
        return runs.train("saved", merged(self._halves, {"train": {"max_steps": 4, "save_every": 2}})).ok()

    def test_a_damaged_one_is_not_gone_on_from(self, runs: Runs) -> None:
        """The largest file of the newest loses a byte: the run goes on from the one before, or says what is wrong."""
        run = self.saved(runs)
        newest = (run.directory / "checkpoints" / "step-00000004").resolve()
        assert newest.is_dir(), run.told
        largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)
        resumed = runs.train("saved", merged(self._halves, {"resume": "auto"}))
        assert resumed.code == 2 or (resumed.code == 0 and len(resumed.losses) == 6), resumed.told
        if resumed.code == 0:
            straight = runs.train("straight", self._halves).ok()
            assert near(resumed.losses, straight.losses, 0.0)
        assert largest.name in resumed.told or newest.name in resumed.told, "which one is damaged is said"

    def test_what_is_written_is_told_whole_and_what_is_damaged_by_name(self, runs: Runs) -> None:
        directory = self.saved(runs).directory / "checkpoints"
        made = self.make()
        names = made.found(place(directory))
        assert names[:2] == ["step-00000004", "step-00000002"], "to go on from, the newest first"
        step = directory / names[0]
        reader, older = made.open(place(step)), made.open(place(directory / names[1]))
        assert reader.damages() == [] and reader.identity != older.identity
        read: list[int] = []
        halves = [reader.damages(share, read.append) for share in ((0, 2), (1, 2))]
        assert halves == [[], []] and sum(read) > 0, "ranks that share the work read all of it"
        largest = max((path for path in step.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        with largest.open("r+b") as file:
            file.truncate(largest.stat().st_size - 1)
        assert any(largest.name in told for told in made.open(place(step)).damages())

    def test_what_a_save_left_half_done_is_removed_and_nothing_else(self, runs: Runs) -> None:
        directory = self.saved(runs).directory / "checkpoints"
        (directory / "step-00000006.tmp").mkdir()
        (directory / "step-00000006.tmp" / "half").write_bytes(b"x")
        before = {path.name for path in directory.iterdir() if not path.name.endswith(".tmp")}
        self.make().clean(place(directory))
        assert {path.name for path in directory.iterdir()} == before

    def test_weights_and_state_come_back_as_they_went(self, runs: Runs) -> None:
        step = self.saved(runs).directory / "checkpoints" / "latest"
        reader = self.make().open(place(step.resolve()))
        model = with_values(small_llama_of(TINY["model"], TINY["data"]["vocab_size"]))
        parameters = dict(model.named_parameters())
        for value in parameters.values():
            value.data.fill_(float("nan"))
        reader.weights(model)(model.stored())
        assert all(value.isfinite().all() for value in parameters.values())
        state = reader.optimizer(parameters)
        assert {path.rpartition("/")[0] for path in state} == set(parameters)
        for path in state:
            found, parameter = state[path], parameters[path.rpartition("/")[0]]
            assert found.isfinite().all() and (found.shape == parameter.shape or found.numel() == 1)
        assert reader.state() and reader.rng(0)

    def test_old_ones_go_as_asked(self, runs: Runs) -> None:
        keeps = {self.plugin.kind: {**self.choice, "keep_last": 1}}
        run = runs.train("few", merged(self._halves, {**keeps, "train": {"max_steps": 6, "save_every": 2}})).ok()
        steps = [path.name for path in (run.directory / "checkpoints").iterdir() if re.fullmatch(r"step-\d+", path.name)]
        assert steps == ["step-00000006"], steps
