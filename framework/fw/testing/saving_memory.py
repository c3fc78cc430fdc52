"""Tests of kinds that make a run take less memory: what each changes, and what it must not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from safetensors import safe_open

from fw.api import OffloadPolicy, OptimizerSpec, PrecisionPolicy, StepSpec
from fw.testing.models import LENGTH, ids, small_llama, with_values
from fw.testing.probe import Probe
from fw.testing.running import Run, Runs, merged, near
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
    """What is recomputed: gradients are the same, and so are losses."""

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
    """What lives elsewhere: losses are the same."""

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
        names = []
        for run in (saved, alone):
            with safe_open(run.directory / "checkpoints" / "latest" / "model.safetensors", "pt") as file:
                names.append(set(file.keys()))
        assert names[0] == names[1]
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


class PeftSuite(TrainedSuite):
    """Which small part trains: the rest keeps its bits, and a checkpoint holds that part.

    Attributes:
        begins_as_base: whether nothing is changed before anything was learnt.
    """

    begins_as_base: ClassVar[bool] = True

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

    def test_everything_that_trains_is_seen_by_the_loss(self) -> None:
        """Whatever it begins with, not only the zeros that some of it may begin as."""
        model = small_llama()
        with torch.device("meta"):
            model.adapters = self.make().apply(model)
        with_values(model)
        generator = torch.Generator().manual_seed(0)
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        with torch.no_grad():
            for parameter in trained.values():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        model(ids()).logsumexp(-1).sum().backward()
        unseen = [name for name, parameter in trained.items() if parameter.grad is None or not parameter.grad.any()]
        assert not unseen, f"no gradient: {', '.join(unseen)}"

    def test_a_checkpoint_holds_what_trains_and_says_what_it_is(self, runs: Runs) -> None:
        step = runs.train("saved", merged(self._halves, {"train": {"max_steps": 3, "save_every": 3}})).ok().directory
        step = step / "checkpoints" / "latest"
        if not (step / "adapter_model.safetensors").exists():
            with safe_open(step / "model.safetensors", "pt") as file:
                assert file.keys(), "all of the model trains"
            return
        model = small_llama()
        with torch.device("meta"):
            adapters = self.make().apply(model)
        assert adapters is not None and set(adapters.tensors) >= {n for n, p in model.named_parameters() if p.requires_grad}
        with safe_open(step / "adapter_model.safetensors", "pt") as file:
            assert len(file.keys()) == len(adapters.tensors), "of a model of as many blocks"
        assert not (step / "model.safetensors").exists()
        assert json.loads((step / "adapter_config.json").read_text()).get("peft_type") == adapters.config.get("peft_type")

    def test_changes_of_low_rank_are_what_it_says(self) -> None:
        """Added to the weights, they give what the adapters beside them do."""
        model, plain = small_llama(), with_values(small_llama())
        plugin = self.make()
        with torch.device("meta"):
            model.adapters = plugin.apply(model)
        with_values(model)
        if (changes := plugin.low_rank(model)) is None:
            pytest.skip("not all that it adds is of low rank")
        generator = torch.Generator().manual_seed(0)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, change in changes.items():
                up, down = parameters[change.up], parameters[change.down]
                up.copy_(torch.randn(up.shape, generator=generator))
                plain.get_parameter(f"{name}.weight").add_(change.scale * up @ down)
            torch.testing.assert_close(model(ids()), plain(ids()), rtol=1e-4, atol=1e-4)

    def test_it_begins_where_the_base_is(self) -> None:
        if not self.begins_as_base:
            pytest.skip("it changes the model at once")
        plain, model = with_values(small_llama()), small_llama()
        with torch.device("meta"):
            model.adapters = self.make().apply(model)
        with_values(model)
        with torch.no_grad():
            torch.testing.assert_close(model(ids()), plain(ids()), rtol=1e-4, atol=1e-4)


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
