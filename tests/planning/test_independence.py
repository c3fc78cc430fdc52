"""What is measured owes nothing to what predicts: a tensor that only the real run keeps is missing in its plan, to the byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from fw.planning.plan import plan
from fw.planning.profile import profile
from fw_plugins.objective.causal_lm import CausalLMObjective

SYNTHETIC = ["data={name: synthetic, vocab_size: 300, samples: 64}", "precision=fp32", "train.micro_batch_size=8"]
PLANTED = 3 << 20
"""Bytes; the peak without them is about 5 MiB."""
SLACK = 32 << 10
"""Bytes that a process of tests keeps besides: random states, tensors of other tests."""


def keeping(nbytes: int) -> Callable[..., torch.Tensor]:
    """The objective's loss, which keeps a tensor of its own until the next one."""
    original = CausalLMObjective.loss_sum

    def loss_sum(self, model, batch):
        self.planted = None  # that of the step before
        self.planted = torch.empty(nbytes, dtype=torch.uint8)
        return original(self, model, batch)

    return loss_sum


@contextmanager
def planted(nbytes: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CausalLMObjective, "loss_sum", keeping(nbytes))
        yield


@pytest.fixture
def peaks(workspace: Path) -> dict[str, int]:
    """Predicted and measured, without and with the tensor."""
    found = {"plan": plan("tiny.yaml", *SYNTHETIC), "profile": profile("tiny.yaml", *SYNTHETIC, steps=2)}
    with planted(PLANTED):
        found |= {"plan with": plan("tiny.yaml", *SYNTHETIC), "profile with": profile("tiny.yaml", *SYNTHETIC, steps=2)}
    return {name: document.largest.allocated_peak for name, document in found.items()}


def test_a_tensor_that_only_the_run_has_is_an_error_of_its_size(peaks):
    assert peaks["profile"] == pytest.approx(peaks["plan"], abs=SLACK), "without it they agree"
    assert peaks["profile with"] - peaks["profile"] == pytest.approx(PLANTED, abs=SLACK), "it is measured"
    assert peaks["profile with"] - peaks["plan"] == pytest.approx(PLANTED, abs=SLACK), "it is missing in the plan made without it"
    assert peaks["plan with"] - peaks["plan"] == PLANTED, "a plan follows the code that runs"
