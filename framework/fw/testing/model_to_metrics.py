"""Tests of what a run is of and what comes of it: model, data, objective, logger."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from fw.api import IGNORED
from fw.kinds.data import VaryingSamples
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
        """On the host, with the values that a run begins from."""
        from fw.assemble import values
        from fw.kinds import make as made_by_name
        from fw.kinds.attention import AttentionPlugin

        plugin = self.make()
        with torch.device("meta"):
            model = plugin.build(plugin.vocab_size or VOCABULARY, LENGTH, made_by_name(AttentionPlugin, "eager"))
        assert all(parameter.is_meta for parameter in model.parameters())
        model.materialise(torch.device("cpu"))
        values(model, 0, None, plugin.weights)(model.stored())
        return model.eval()

    def test_logits_depend_on_what_came_before_and_nothing_else(self) -> None:
        model, before = self.built(), ids()
        after = before.clone()
        after[:, 9:] = (after[:, 9:] + 1) % VOCABULARY
        with torch.no_grad():
            one, other = model(before), model(after)
        assert one.shape == (3, LENGTH, model.vocab_size)
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
        assert model.flops_per_token(LENGTH) > 0 and model.vocab_size >= VOCABULARY
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

    def test_what_was_prepared_is_not_made_again(self) -> None:
        made = self.make()
        made.prepare(lambda text: None)
        first = made.open(32)
        made.prepare(lambda text: None)
        assert made.open(32).fingerprint == first.fingerprint

    def test_a_sample_that_somebody_changes_is_whole_the_next_time(self) -> None:
        corpus = self.opened()
        before = corpus.train[0]["input_ids"].clone()
        corpus.train[0]["input_ids"].fill_(0)
        assert torch.equal(corpus.train[0]["input_ids"], before), "a sample is the reader's own, or workers would share it"

    def test_lengths_are_known_without_reading(self) -> None:
        corpus = self.opened()
        if not isinstance(corpus.train, VaryingSamples):
            assert {len(corpus.train[index]["input_ids"]) for index in range(min(5, len(corpus.train)))} == {32}
            return
        for index in {0, len(corpus.train) // 2, len(corpus.train) - 1}:
            assert len(corpus.train[index]["input_ids"]) == corpus.train.lengths[index]

    def test_the_tokenizer_reads_back_what_it_wrote(self) -> None:
        corpus = self.opened()
        text = corpus.val_text()[0][:200]
        again = corpus.tokenizer.encode(corpus.tokenizer.decode(corpus.tokenizer.encode(text), skip_special_tokens=True))
        assert again == corpus.tokenizer.encode(text) and all(0 <= token < corpus.tokenizer.vocab_size for token in again)

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
        """A sum, without what the objective adds in training only. Where it computes with another model, that is one of other values."""
        made = self.make()
        if made.beside is not None:
            made.use(with_values(small_llama(), seed=1))
        found: torch.Tensor = made.loss_sum(model, batch)
        return found

    def test_sums_and_counts_add_up_over_samples(self) -> None:
        model, batch = with_values(small_llama()), self.batch()
        parts = [{key: value[begin : begin + 2] for key, value in batch.items()} for begin in (0, 2)]
        whole = self.loss(model, batch)
        assert whole.dim() == 0 and whole.dtype == torch.float32 and whole.requires_grad
        torch.testing.assert_close(sum(self.loss(model, part) for part in parts), whole, rtol=1e-5, atol=1e-5)
        assert sum(self.make().count(part) for part in parts) == self.make().count(batch) > 0

    def test_gradients_add_up_as_the_sums_do(self) -> None:
        batch = self.batch()
        parts = [{key: value[begin : begin + 2] for key, value in batch.items()} for begin in (0, 2)]
        gradients = []
        for some in ([batch], parts):
            model = with_values(small_llama())
            for each in some:
                self.loss(model, each).backward()
            gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
        for name, gradient in gradients[0].items():
            assert gradient is not None and gradient.isfinite().all(), f"{name} has no gradient, or none that is a number"
            torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-5)

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
