"""The main job on CUDA, against the same job on the CPU."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

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


@pytest.mark.parametrize("options", [[], ["sharding=fsdp"], ["precision=bf16_true"], ["offload.optimizer=cpu"]], ids=str)
def test_the_average_of_weights_is_the_hosts(workspace, options):
    """And validation by it changes nothing of training."""
    words = ["train.ema_decay=0.9", "train.val_every=5", "train.save_every=20", *options]
    for device in ("cpu", "cuda"):
        fw("train", "tiny.yaml", *words, f"launch.accelerator={device}", f"train.run_dir={device}").ok()
    fw("train", "tiny.yaml", *words, CUDA, "train.ema_decay=0", "train.run_dir=plain").ok()
    assert column("cuda", "loss") == column("plain", "loss")
    one, other = (load_file(f"{device}/checkpoints/latest/average.safetensors") for device in ("cpu", "cuda"))
    close = 0.03 if options == ["precision=bf16_true"] else 1e-3
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=close, atol=close)


@pytest.mark.parametrize(
    "options", [["train.ema_decay=0.9"], ["offload.optimizer=cpu"], ["sharding=fsdp", "optimizer=adamw_8bit"]], ids=str
)
def test_resume_is_exact(workspace, options):
    fw("train", "tiny.yaml", CUDA, *options, "train.max_steps=40", "train.run_dir=straight").ok()
    fw("train", "tiny.yaml", CUDA, *options, "train.save_every=20", "train.run_dir=halves").ok()
    fw("train", "tiny.yaml", CUDA, *options, "train.max_steps=40", "train.run_dir=halves", "resume=auto").ok()
    assert [r["loss"] for r in metrics("halves")] == pytest.approx([r["loss"] for r in metrics("straight")], rel=1e-6)


def test_recomputation_chosen_by_itself_changes_nothing(workspace):
    """Grouped queries in bf16, whose attention is an operator of the GPU's own."""
    wide = [CUDA, "precision=bf16", "model.hidden_size=256", "train.sequence_length=256"]
    fw("train", "tiny.yaml", *wide, "train.run_dir=whole").ok()
    fw("train", "tiny.yaml", *wide, "activation={name: auto, budget: 4MiB}", "train.run_dir=less").ok()
    assert column("less", "loss") == pytest.approx(column("whole", "loss"), rel=1e-2)
    assert column("less", "peak_memory_bytes")[-1] < column("whole", "peak_memory_bytes")[-1]
