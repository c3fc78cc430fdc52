"""Tests of what a run is of and what comes of it: model, data, objective, logger, checkpoint."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from fw.api import IGNORED
from fw.testing.models import LENGTH, VOCABULARY, ids, small_llama, with_values
from fw.testing.running import Run, Runs, merged, near
from fw.testing.trained import TrainedSuite


class ModelSuite(TrainedSuite):
    """A model: what it sees, what it says of itself, and that transformers computes the same where it knows it.

    Attributes:
        tree: its training sections; a run's own model is this one.
        hf: whether transformers loads its checkpoints.
    """

    hf: ClassVar[bool] = True

    def built(self) -> Any:
        """On the host, with initial values."""
        from fw.kinds import make as made_by_name
        from fw.kinds.attention import AttentionPlugin

        with torch.device("meta"):
            model = self.make().build(VOCABULARY, LENGTH, made_by_name(AttentionPlugin, "eager"))
        assert all(parameter.is_meta for parameter in model.parameters())
        return with_values(model).eval()

    def test_logits_depend_on_what_came_before_and_nothing_else(self) -> None:
        model, before = self.built(), ids()
        after = before.clone()
        after[:, 9:] = (after[:, 9:] + 1) % VOCABULARY
        with torch.no_grad():
            one, other = model(before), model(after)
        assert one.shape == (3, LENGTH, VOCABULARY)
        torch.testing.assert_close(one[:, :9], other[:, :9], rtol=0, atol=1e-5)
        assert not torch.allclose(one[:, 9:], other[:, 9:])

    def test_documents_that_share_a_row_do_not_see_each_other(self) -> None:
        model, tokens = self.built(), ids()
        segments = torch.tensor([[1] * 6 + [2] * 10]).expand(3, -1)
        with torch.no_grad():
            packed = model(tokens, segments_BL=segments)
            apart = [model(tokens[:, :6]), model(tokens[:, 6:])]
        torch.testing.assert_close(packed, torch.cat(apart, 1), rtol=1e-4, atol=1e-4)

    def test_it_says_of_itself_what_is_so(self) -> None:
        model = self.built()
        names = {name for name, _ in model.named_parameters()}
        assert model.undecayed() <= names and len(model.blocks) == len(model.kv_shapes) > 0
        assert model.flops_per_token(LENGTH) > 0 and model.vocab_size == VOCABULARY
        assert all(tensor.name for name in names for tensor in model.hf_tensors(name))

    def test_transformers_computes_the_same(self, runs: Runs) -> None:
        if not self.hf:
            pytest.skip("transformers does not know it")
        transformers = pytest.importorskip("transformers")
        import fw

        directory = runs.train("saved", merged(self.sections, {"train": {"save_every": 6}})).ok().directory / "checkpoints" / "latest"
        tokens = torch.arange(40).view(2, 20)
        with torch.no_grad():
            theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)(tokens).logits
            ours = fw.load_model(directory, dtype=torch.float32)(tokens)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


class DataSuite(TrainedSuite):
    """Where tokens come from: the same samples on every rank and in every run."""

    def opened(self) -> Any:
        """The corpus, prepared."""
        made = self.make()
        made.prepare(lambda text: None)
        return made.open(32)

    def test_samples_are_what_the_contract_says(self) -> None:
        corpus = self.opened()
        assert len(corpus.train) > 0 and corpus.train_tokens > 0
        for index in (0, len(corpus.train) - 1):
            sample = corpus.train[index]
            tokens, labels = sample["input_ids"], sample["labels"]
            assert tokens.dtype == labels.dtype == torch.int64 and tokens.shape == labels.shape and 1 <= len(tokens) <= 32
            assert int(tokens.min()) >= 0 and int(tokens.max()) < corpus.tokenizer.vocab_size
            told = labels[labels != IGNORED]
            assert told.numel() == 0 or (int(told.min()) >= 0 and int(told.max()) < corpus.tokenizer.vocab_size)

    def test_samples_are_the_same_whenever_and_in_whatever_order_they_are_read(self) -> None:
        one, other = self.opened(), self.opened()
        assert one.fingerprint == other.fingerprint and len(one.train) == len(other.train)
        last = len(one.train) - 1
        for index in (last, 0, last // 2):
            assert all(torch.equal(one.train[index][key], other.train[index][key]) for key in ("input_ids", "labels"))


class ObjectiveSuite(TrainedSuite):
    """A loss: a sum over samples and a count, so that micro-batches and ranks weigh right."""

    def batch(self, rows: int = 4) -> dict[str, torch.Tensor]:
        """Samples as the objective takes them; here those of language models, with some labels left out."""
        tokens = ids(rows)
        labels = torch.roll(tokens, -1, 1)
        labels[:, -1] = IGNORED
        labels[0, 3:7] = IGNORED
        return {"input_ids": tokens, "labels": labels}

    def loss(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A sum, without what the objective adds in training only."""
        found: torch.Tensor = self.make().loss_sum(model, batch)
        return found

    def test_sums_and_counts_add_up_over_samples(self) -> None:
        model, batch = with_values(small_llama()), self.batch()
        parts = [{key: value[begin : begin + 2] for key, value in batch.items()} for begin in (0, 2)]
        whole = self.loss(model, batch)
        assert whole.dim() == 0 and whole.dtype == torch.float32 and whole.requires_grad
        torch.testing.assert_close(sum(self.loss(model, part) for part in parts), whole, rtol=1e-5, atol=1e-5)
        assert sum(self.make().count(part) for part in parts) == self.make().count(batch) > 0

    def test_what_is_to_be_ignored_is(self) -> None:
        model, batch = with_values(small_llama()), self.batch()
        nothing = {**batch, "labels": torch.full_like(batch["labels"], IGNORED)}
        assert self.make().count(nothing) == 0 and self.loss(model, nothing) == 0 < self.loss(model, batch)


class LoggerSuite(TrainedSuite):
    """Where metrics go: what is written there is what the run did."""

    def rows(self, run_dir: Path) -> list[dict[str, float]] | None:
        """What it has written, by step; None where this test cannot read it."""
        return None

    def test_what_it_wrote_is_what_the_run_did(self, runs: Runs, whole: Run) -> None:
        if (rows := self.rows(whole.directory)) is None:
            pytest.skip("rows are not read back")
        with (whole.directory / "metrics.csv").open(newline="") as file:
            expected = [float(row["loss"]) for row in csv.DictReader(file)]
        assert near([row["loss"] for row in rows], expected, 1e-6)

    @property
    def sections(self) -> dict[str, Any]:
        """Beside csv, by which these tests read losses."""
        found = super().sections
        if self.entry.name == "csv":
            found["logger"] = [self.choice]
        return found


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

    def test_old_ones_go_as_asked(self, runs: Runs) -> None:
        keeps = {self.plugin.kind: {**self.choice, "keep_last": 1}}
        run = runs.train("few", merged(self._halves, {**keeps, "train": {"max_steps": 6, "save_every": 2}})).ok()
        steps = [path.name for path in (run.directory / "checkpoints").iterdir() if re.fullmatch(r"step-\d+", path.name)]
        assert steps == ["step-00000006"], steps
