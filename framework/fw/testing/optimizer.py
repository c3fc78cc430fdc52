"""Tests of optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from fw.api import OffloadPolicy, OptimizerSpec
from fw.testing.probe import Probe
from fw.testing.trained import DDP, FSDP, TrainedSuite

ONE_MICRO_BATCH: dict[str, Any] = {"train": {"micro_batch_size": 4, "gradient_clip_norm": 0.0}}
HALF: dict[str, Any] = {"precision": "bf16_true"}


class OptimizerSuite(TrainedSuite):
    """An update rule: what it does to weights, what it keeps, and where it runs.

    Attributes:
        tolerance: relative, of weights after three steps beside the reference's.
    """

    tolerance: ClassVar[float] = 1e-6
    probes: ClassVar[Mapping[str, Probe]] = {
        "ddp": Probe(DDP),
        "fsdp": Probe(FSDP),
        "bf16_true": Probe(HALF, tolerance=None),
        "offload": Probe({"offload": {"optimizer": "cpu"}}),
    }

    def reference(self, weights: list[nn.Parameter]) -> torch.optim.Optimizer | None:
        """Another optimizer that does the same as :attr:`options` say; None where there is none."""
        return None

    def spec(self) -> OptimizerSpec:
        """For parameters on the host."""
        made = self.make()
        made.check("cpu", OffloadPolicy())
        found: OptimizerSpec = made.spec(torch.device("cpu"))
        return found

    def stepped(self, dtype: torch.dtype, build: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> tuple[list[nn.Parameter], Any]:
        """Weights after three steps on fixed gradients."""
        generator = torch.Generator().manual_seed(0)
        weights = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((24, 16), (16,), (3, 5))]
        optimizer = build(weights)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator).to(dtype)
            optimizer.step()
        return weights, optimizer

    def built(self, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        """As sharding builds it: what is at least two-dimensional apart, where the rule asks for that."""
        spec = self.spec()
        groups: list[dict[str, Any]] = [{"params": weights}]
        if spec.matrices:
            groups = [
                {"params": [w for w in weights if w.dim() > 1], "matrix": True},
                {"params": [w for w in weights if w.dim() < 2], "matrix": False},
            ]
        for group in groups:
            group["weight_decay"] = spec.weight_decay
        return spec.cls(groups, lr=spec.lr, **spec.arguments)

    def test_its_updates_are_the_references(self) -> None:
        def named(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
            if (found := self.reference(weights)) is None:
                pytest.skip("no reference is named")
            return found

        expected, _ = self.stepped(torch.float32, named)
        found, _ = self.stepped(torch.float32, self.built)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=self.tolerance, atol=self.tolerance)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_weights_move_and_stay_numbers(self, dtype: torch.dtype) -> None:
        before, _ = self.stepped(dtype, lambda weights: torch.optim.SGD(weights, lr=0.0))
        after, _ = self.stepped(dtype, self.built)
        assert all(weight.isfinite().all() and weight.dtype == dtype for weight in after)
        assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))

    def test_its_state_is_tensors_of_the_shapes_that_sharding_can_divide(self) -> None:
        spec = self.spec()
        weights, optimizer = self.stepped(torch.float32, self.built)
        for weight in weights:
            for key, value in optimizer.state[weight].items():
                assert isinstance(value, Tensor), f"state '{key}' is {type(value).__name__}, and checkpoints hold tensors"
                placed = value.shape == weight.shape or value.dim() == 0 or hasattr(optimizer, "begin")
                shapes = f"state '{key}' {tuple(value.shape)} of a parameter {tuple(weight.shape)}"
                assert placed or spec.state != "elements", f"{shapes} cannot be divided with it"

    def test_a_parameter_without_a_gradient_is_left_alone(self) -> None:
        weights = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))]
        optimizer = self.built(weights)
        weights[0].grad = torch.ones(4, 4)
        optimizer.step()
        assert torch.equal(weights[1], torch.ones(4, 4)) and not torch.equal(weights[0], torch.ones(4, 4))
