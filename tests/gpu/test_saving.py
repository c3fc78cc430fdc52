"""Saving from a GPU: copies through page-locked memory are exact, and a background save is what a save at once is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fw
from fw.checkpointing.ranks import OneRank
from fw.checkpointing.staging import Stage
from fw.kinds.checkpoint import Part, Snapshot

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def test_copies_are_exact_whatever_follows_on_the_device():
    """Larger than both page-locked buffers together, in every dtype a checkpoint holds, and overwritten right after."""
    torch.manual_seed(0)
    tensors = {
        "large": torch.randn(50_000_000, device="cuda"),
        "half": torch.randn(1000, 333, device="cuda", dtype=torch.bfloat16),
        "codes": torch.randint(0, 255, (999,), device="cuda", dtype=torch.uint8),
        "transposed": torch.randn(300, 200, device="cuda").t(),
        "scalar": torch.tensor(3.0, device="cuda"),
        "host": torch.randn(17),
    }
    expected = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    tensors["large"].mul_(2)  # still under way when the copy is planned
    expected["large"] *= 2
    parts = {"model": {name: Part(tensor) for name, tensor in tensors.items()}}
    copy = Stage(OneRank()).plan(parts).run(Snapshot(1, parts, {}, {}, lambda path: None))
    for tensor in tensors.values():
        tensor.zero_()
    for name, part in copy.tensors["model"].items():
        assert part.tensor.piece().read().equal(expected[name]), name


def test_in_the_background_the_same_is_written(workspace):
    overrides = ("train.save_every=5", "launch.accelerator=cuda", "train.max_steps=10")
    fw.train("tiny.yaml", *overrides, "train.run_dir=one")
    fw.train("tiny.yaml", *overrides, "train.run_dir=two", "checkpoint.asynchronous=true")
    for step in (5, 10):
        for name in ("model.safetensors", "optimizer.safetensors", "rng.json"):
            one, two = (Path(run) / "checkpoints" / f"step-{step:08d}" / name for run in ("one", "two"))
            assert one.read_bytes() == two.read_bytes(), (step, name)


def test_saving_at_once_takes_no_memory_of_the_device(workspace):
    from fw.place import place
    from fw_plugins.checkpoint.safetensors import SafetensorsCheckpoint, SafetensorsConfig

    parts = {"model": {f"w{i}": Part(torch.randn(1_000_000, device="cuda")) for i in range(8)}}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    SafetensorsCheckpoint(SafetensorsConfig()).save(place(Path("out")), Snapshot(1, parts, {}, {}, lambda path: None), OneRank())
    assert torch.cuda.max_memory_allocated() == before
