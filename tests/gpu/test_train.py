"""The main job on CUDA, against the same job on the CPU."""

from __future__ import annotations

import pytest
import torch

from conftest import column, fw, metrics

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CUDA = "launch.accelerator=cuda"


def test_cuda_equals_the_cpu(workspace):
    """The same initial weights and data on either device; 20 steps in fp32."""
    fw("train", "tiny.yaml", "train.run_dir=cpu").ok()
    fw("train", "tiny.yaml", CUDA, "train.run_dir=cuda").ok()
    for name in ("loss", "grad_norm"):
        assert column("cuda", name) == pytest.approx(column("cpu", name), rel=1e-3)
    assert column("cuda", "peak_memory_bytes")[-1] < 2**30


@pytest.mark.parametrize("precision", ["bf16", "bf16_true", "fp16"])
def test_lower_precisions_follow_fp32(workspace, precision):
    fw("train", "tiny.yaml", CUDA, "train.run_dir=full").ok()
    fw("train", "tiny.yaml", CUDA, f"precision={precision}", "train.run_dir=low").ok()
    full, low = column("full", "loss"), column("low", "loss")
    assert low[-1] == pytest.approx(full[-1], rel=5e-2)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_sharding_over_nccl_equals_one_rank(workspace, sharding):
    ranks = min(2, torch.cuda.device_count())
    fw("train", "tiny.yaml", CUDA, "train.run_dir=one").ok()
    fw("train", "tiny.yaml", CUDA, f"sharding={sharding}", f"launch.devices={ranks}", "train.run_dir=some").ok()
    assert column("some", "loss") == pytest.approx(column("one", "loss"), rel=1e-4)


def test_resume_is_exact(workspace):
    fw("train", "tiny.yaml", CUDA, "train.max_steps=40", "train.run_dir=straight").ok()
    fw("train", "tiny.yaml", CUDA, "train.save_every=20", "train.run_dir=halves").ok()
    fw("train", "tiny.yaml", CUDA, "train.max_steps=40", "train.run_dir=halves", "resume=auto").ok()
    assert [r["loss"] for r in metrics("halves")] == pytest.approx([r["loss"] for r in metrics("straight")], rel=1e-6)
