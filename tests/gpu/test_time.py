"""Where a step's time goes on a GPU."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from conftest import fw
from fw.meter.step_time import StepTime

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

WIDE = [
    "launch.accelerator=cuda",
    "data={name: synthetic, vocab_size: 4096, samples: 64}",
    "precision=bf16",
    "model.hidden_size=1024",
    "model.intermediate_size=4096",
    "model.num_attention_heads=8",
    "train.global_batch_size=8",
    "train.sequence_length=512",
]


def test_kernels_phases_and_files(workspace: Path) -> None:
    fw("profile", "tiny.yaml", *WIDE, "--trace", "trace").ok()
    time = StepTime.from_json(json.loads(Path("trace/step-time.json").read_text()))
    (phases,) = time.phases
    assert all(phases[name] > 0 for name in ("forward", "backward", "update"))
    assert {"host", "allocated", "reserved", "driver"} == set(time.levels["backward"])
    assert time.levels["backward"]["allocated"] <= time.levels["backward"]["reserved"] < time.levels["backward"]["driver"]
    trace = time.trace
    assert trace is not None
    told = sum(each.seconds for each in trace.operators) + trace.idle_seconds
    assert told == pytest.approx(trace.seconds, rel=0.05)
    products = [each for each in trace.operators if each.flops and each.dtype == "bfloat16"]
    assert products and sum(each.seconds for each in products) > 0
    with Path("trace/rank0.memory.pickle").open("rb") as file:
        snapshot = pickle.load(file)
    assert snapshot["segments"] and any(event["action"] == "alloc" for event in snapshot["device_traces"][0])


def test_operators_of_backward_are_told_with_their_time(workspace: Path) -> None:
    fw("profile", "tiny.yaml", *WIDE, "--trace", "trace").ok()
    trace = StepTime.from_json(json.loads(Path("trace/step-time.json").read_text())).trace
    assert trace is not None
    products = [each for each in trace.operators if each.name == "aten::mm" and each.flops]
    # Of each product backward has two, which take about twice forward's time.
    calls = sum(each.calls for each in products)
    forwards = 2 * 7 + 1  # of two blocks and the head, for each of the step's micro-batches
    assert calls % (3 * forwards) == 0, [(each.shapes, each.calls) for each in products]
    assert not any(each.name.startswith(("Optimizer.step", "ProfilerStep", "cuda")) for each in trace.operators)
