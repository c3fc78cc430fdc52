"""What is measured owes nothing to what predicts: a tensor that only the real run keeps is missing in its plan, to the byte."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conftest import environment

OVERRIDES = ["data={name: synthetic, vocab_size: 300, samples: 64}", "precision=fp32", "train.micro_batch_size=8"]
PLANTED = 3 << 20
"""Bytes; the peak without them is about 5 MiB."""
SLACK = 1024

PROGRAM = """
import json, os, sys
import torch
from fw.planning.plan import plan
from fw.planning.profile import profile
from fw_plugins.objective.causal_lm import CausalLMObjective

verb, nbytes, *overrides = sys.argv[1:]
original = CausalLMObjective.loss_sum

def keeping(self, model, batch):
    self.planted = None  # that of the step before
    self.planted = torch.empty(int(nbytes), dtype=torch.uint8)
    return original(self, model, batch)

if int(nbytes):
    CausalLMObjective.loss_sum = keeping
document = plan("tiny.yaml", *overrides) if verb == "plan" else profile("tiny.yaml", *overrides, steps=2)
print("peak", document.largest.allocated_peak)
"""


def peak(verb: str, planted: int) -> int:
    """In a process of its own, with an objective that keeps so many bytes from one loss to the next."""
    command = [sys.executable, "-c", PROGRAM, verb, str(planted), *OVERRIDES]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return int(done.stdout.rpartition("peak ")[2])


def test_a_tensor_that_only_the_run_has_is_an_error_of_its_size(workspace: Path) -> None:
    planned, measured = peak("plan", 0), peak("profile", 0)
    planned_with, measured_with = peak("plan", PLANTED), peak("profile", PLANTED)
    assert measured == pytest.approx(planned, abs=SLACK), "without it they agree"
    assert measured_with - planned == pytest.approx(PLANTED, abs=SLACK), "it is missing in the plan made without it"
    assert planned_with - planned == PLANTED, "a plan follows the code that runs"
