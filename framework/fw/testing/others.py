"""Tests of kinds that runs show best: what each changes, and what it must not."""

from __future__ import annotations

import csv
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from fw.api import IGNORED, LaunchSection, OffloadPolicy, OptimizerSpec, PrecisionPolicy, StepSpec, UserError
from fw.testing.models import LENGTH, VOCABULARY, ids, small_llama, with_values
from fw.testing.probe import Probe
from fw.testing.running import Run, Runs, merged, near
from fw.testing.suite import PluginSuite
from fw.testing.trained import DDP, FSDP, TrainedSuite

BF16: dict[str, Any] = {"precision": "bf16"}
LOW: Mapping[str, Probe] = {"ddp": Probe(DDP, tolerance=5e-3), "fsdp": Probe(FSDP, tolerance=5e-3)}
"""With fewer bits, sums of gradients in another order differ more."""


def step_spec() -> StepSpec:
    """Of a step in fp32 on the host."""
    return StepSpec(PrecisionPolicy(torch.float32, torch.float32, torch.float32), OffloadPolicy(), OptimizerSpec(torch.optim.SGD, 0.1))


class _Unchanged(TrainedSuite):
    """Of a plugin that changes memory and time, and no result.

    Attributes:
        tolerance: relative, of losses beside those of a run without the plugin.
    """

    tolerance: ClassVar[float] = 1e-6

    def test_losses_are_those_without_it(self, runs: Runs, whole: Run) -> None:
        without = runs.train("without", self.tree).ok()
        assert near(whole.losses, without.losses, self.tolerance), (whole.losses, without.losses)


class ActivationSuite(_Unchanged):
    """What is recomputed: gradients are the same, and less waits for backward."""

    probes: ClassVar[Mapping[str, Probe]] = {
        "ddp": Probe(DDP),
        "fsdp": Probe(FSDP),
        "dropout": Probe({"model": {"attention_dropout": 0.1}}, tolerance=None),
        "bf16": Probe(BF16, tolerance=None),
    }

    def test_gradients_are_the_same_and_names_stay(self) -> None:
        found = []
        for applies in (False, True):
            model = small_llama()
            names = [name for name, _ in model.named_parameters()]
            if applies:
                self.make().apply(model, step_spec(), LENGTH)
            assert [name for name, _ in model.named_parameters()] == names
            with_values(model)(ids()).logsumexp(-1).sum().backward()
            found.append({name: parameter.grad for name, parameter in model.named_parameters()})
        for name, expected in found[0].items():
            torch.testing.assert_close(found[1][name], expected, rtol=1e-5, atol=1e-6)


class OffloadSuite(_Unchanged):
    """What lives elsewhere: losses are the same, and nothing of it stays behind."""

    def test_its_policy_is_one(self) -> None:
        assert isinstance(self.make().policy(), OffloadPolicy) and self.make().policy() == self.make().policy()


class ShardingSuite(_Unchanged):
    """How ranks divide a model: losses are one rank's, and names those of the model.

    Attributes:
        ranks: that a run of it has.
    """

    ranks: ClassVar[int] = 2
    probes: ClassVar[Mapping[str, Probe]] = {
        "bf16": Probe(BF16, tolerance=None),
        "micro-batches": Probe({"train": {"micro_batch_size": 2}}, before={"train": {"micro_batch_size": 1}}),
    }
    tolerance: ClassVar[float] = 1e-5

    @property
    def sections(self) -> dict[str, Any]:
        """With the ranks that it divides between."""
        return merged(super().sections, {"launch": {"devices": self.ranks}})

    def test_a_checkpoint_has_the_models_names_and_serves_one_rank(self, runs: Runs) -> None:
        saved = runs.train("saved", merged(self._halves, {"train": {"max_steps": 3, "save_every": 3}})).ok()
        alone = runs.train("alone", {"train": {"max_steps": 3, "save_every": 3}, "schedule": {"name": "constant"}}).ok()
        names = [json.loads((run.directory / "checkpoints" / "latest" / "manifest.json").read_text()) for run in (saved, alone)]
        assert set(names[0]["files"]) >= {"config.json"} and set(names[1]["files"]) >= {"config.json"}
        step = str(saved.directory / "checkpoints" / "latest")
        resumed = runs.train("resumed", {"resume": step, "schedule": {"name": "constant"}}).ok()
        straight = runs.train("straight", {"schedule": {"name": "constant"}}).ok()
        assert near(resumed.losses, straight.losses[3:], self.tolerance), (resumed.losses, straight.losses)


class PrecisionSuite(TrainedSuite):
    """Dtypes: a run in them follows the one in fp32.

    Attributes:
        tolerance: relative, of losses beside fp32's.
    """

    tolerance: ClassVar[float] = 0.05
    probes: ClassVar[Mapping[str, Probe]] = LOW

    def test_losses_follow_those_of_fp32(self, runs: Runs, whole: Run) -> None:
        without = runs.train("without", {"precision": "fp32"}).ok()
        assert near(whole.losses, without.losses, self.tolerance), (whole.losses, without.losses)

    def test_its_policy_is_the_same_at_a_step_whenever_asked(self) -> None:
        made = self.make()
        assert isinstance(made.policy(), PrecisionPolicy) and made.policy_at(0) == made.policy()
        assert [made.policy_at(step) for step in (5, 0, 3)] == [self.make().policy_at(step) for step in (5, 0, 3)]


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
        before = self.loss(model, batch)
        batch["labels"] = batch["labels"].where(batch["labels"] != IGNORED, torch.tensor(IGNORED))
        nothing = {**batch, "labels": torch.full_like(batch["labels"], IGNORED)}
        assert self.make().count(nothing) == 0 and self.loss(model, nothing) == 0
        assert torch.equal(self.loss(model, batch), before)


class PeftSuite(TrainedSuite):
    """Which small part trains: the rest keeps its bits, and a checkpoint holds that part."""

    plan_tolerance: ClassVar[float | None] = 0.02

    def test_a_step_moves_what_trains_and_nothing_else(self) -> None:
        model = small_llama()
        names = {name for name, _ in model.named_parameters()}
        with torch.device("meta"):
            model.adapters = adapters = self.make().apply(model)
        with_values(model)
        assert names <= {name for name, _ in model.named_parameters()}, "what was there keeps its names"
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        for _ in range(2):
            model(ids()).logsumexp(-1).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
        assert moved and moved <= trains
        assert adapters is None or len(trains) < len(before)

    def test_it_begins_where_the_base_is(self) -> None:
        plain, model = with_values(small_llama()), small_llama()
        with torch.device("meta"):
            model.adapters = self.make().apply(model)
        with_values(model)
        with torch.no_grad():
            torch.testing.assert_close(model(ids()), plain(ids()), rtol=1e-4, atol=1e-4)


class LoggerSuite(TrainedSuite):
    """Where metrics go: the run is the same, and a resumed one does not tell twice what came after its step."""

    resume_tolerance: ClassVar[float] = 0.0

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
    def choice(self) -> dict[str, Any]:
        """One that is csv itself is there already."""
        return super().choice

    @property
    def sections(self) -> dict[str, Any]:
        """Beside csv, by which these tests read losses."""
        found = super().sections
        if self.entry.name == "csv":
            found["logger"] = [self.choice]
        return found


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


class QuantizationSuite(TrainedSuite):
    """Weights in fewer bits, frozen beside an adapter that trains.

    Attributes:
        error: of a weight, relative to its norm, at most.
    """

    error: ClassVar[float] = 0.2
    probes: ClassVar[Mapping[str, Probe]] = LOW
    tree: ClassVar[Mapping[str, Any]] = {"peft": {"name": "lora", "rank": 4}, "precision": "bf16"}

    def test_codes_are_integers_that_stay_and_stand_for_the_weights(self) -> None:
        model = small_llama()
        with torch.device("meta"):
            quantized = self.make().apply(model, torch.bfloat16)
        generator = torch.Generator().manual_seed(0)
        for name, weight in quantized.items():
            dense = torch.randn(weight.shape, generator=generator).to(weight.dtype)
            codes = weight.quantize(dense)
            assert all(not value.is_floating_point() for value in codes.values()), name
            again = weight.quantize(dense)
            assert all(torch.equal(again[key], value) for key, value in codes.items())
        if not quantized:
            return
        frozen = dict(model.named_parameters())
        assert not any(frozen[part].requires_grad for weight in quantized.values() for part in weight.kept)
        (first, weight), *_ = quantized.items()
        model.materialise(torch.device("cpu"))
        dense = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        with torch.no_grad():
            for key, value in weight.quantize(dense).items():
                model.get_parameter(key).copy_(value)
        layer = model.get_submodule(first.rpartition(".")[0])
        back = layer.dense_weight(torch.float32)  # type: ignore[operator]
        assert (back - dense.float()).norm() <= self.error * dense.float().norm()


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


class LauncherSuite(PluginSuite):
    """How ranks start: each with torchrun's variables, and how they end is how the run ends.

    Attributes:
        starts: whether it starts ranks in place; else it must say what to do.
    """

    starts: ClassVar[bool] = True

    def launched(self, directory: Path, program: str, ranks: int = 2) -> int:
        """The exit code of ranks that run a program."""
        file = directory / "rank.py"
        file.write_text(program)
        command, launch = [sys.executable, str(file)], LaunchSection(devices=ranks)
        return int(self.make().launch(command, launch, lambda attempt: {"FW_TESTING": str(attempt)}))

    def test_every_rank_knows_who_it_is(self, tmp_path: Path) -> None:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "FW_TESTING")
        program = (
            f"import json, os\nvalues = {{name: os.environ.get(name) for name in {names}}}\n"
            f"open(os.path.join({str(tmp_path)!r}, 'rank' + os.environ['RANK']), 'w').write(json.dumps(values))\n"
        )
        if not self.starts:
            with pytest.raises(UserError):
                self.launched(tmp_path, program)
            return
        assert self.launched(tmp_path, program) == 0
        told = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
        assert [each["RANK"] for each in told] == ["0", "1"] and {each["WORLD_SIZE"] for each in told} == {"2"}
        assert all(all(each.values()) for each in told) and told[0]["MASTER_PORT"] == told[1]["MASTER_PORT"]

    def test_a_rank_that_fails_ends_the_run(self, tmp_path: Path) -> None:
        if not self.starts:
            pytest.skip("it starts no ranks")
        program = "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit(1)\ntime.sleep(600)\n"
        before = dict(os.environ)
        assert self.launched(tmp_path, program) != 0
        assert dict(os.environ) == before, "and leaves the environment as it was"
