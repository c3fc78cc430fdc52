"""Precisions on a GPU: float8 products of its own, evaluations that leave the fp32 weights on the host, memory given back."""

from __future__ import annotations

import pytest
import torch

from conftest import column, fw, summary
from fw_models.llama import Llama, LlamaConfig
from fw_plugins.attention.sdpa import SDPAttention
from fw_plugins.sharding.evaluating import weights_in

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

CUDA = "launch.accelerator=cuda"


def has(major: int, minor: int) -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (major, minor)


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param("tensorwise", marks=pytest.mark.skipif(not has(8, 9), reason="needs compute capability 8.9")),
        pytest.param("rowwise", marks=pytest.mark.skipif(not has(9, 0), reason="needs compute capability 9.0")),
        pytest.param("rowwise_with_gw_hp", marks=pytest.mark.skipif(not has(9, 0), reason="needs compute capability 9.0")),
    ],
)
def test_products_in_float8_follow_those_emulated(workspace, recipe):
    for emulate in ("true", "false"):
        precision = f"precision={{name: fp8, recipe: {recipe}, emulate: {emulate}}}"
        fw("train", "tiny.yaml", CUDA, precision, f"train.run_dir={emulate}").ok()
    assert column("false", "loss") == pytest.approx(column("true", "loss"), rel=2e-3)


def test_weights_wait_on_the_host_and_come_back_to_the_bit():
    with torch.device("cuda"):
        made = Llama(LlamaConfig(512, 4, 8, 8, intermediate_size=1024), 1024, 64, SDPAttention(None))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    before = [p.detach().clone() for p in made.parameters()]
    whole = sum(p.nbytes for p in before)
    held = torch.cuda.memory_allocated()
    with torch.no_grad(), weights_in(made, torch.bfloat16, leave_device=True):
        assert abs(held - torch.cuda.memory_allocated() - whole / 2) < 0.02 * whole
    assert all(a.equal(b) for a, b in zip(made.parameters(), before, strict=True))
    assert abs(torch.cuda.memory_allocated() - held) < 0.01 * whole


def test_evaluations_on_converted_weights_change_no_training_and_reserved_memory_falls(workspace):
    words = [CUDA, "train.max_steps=4", "train.val_every=2", "train.sequence_length=256", "train.micro_batch_size=8"]
    for name, options in (("with", "{name: bf16, full_eval: true}"), ("without", "bf16")):
        fw("train", "tiny.yaml", *words, f"precision={options}", "memory.release=true", f"train.run_dir={name}").ok()
    assert column("with", "loss") == pytest.approx(column("without", "loss"), rel=1e-3)
    assert summary("without")["released_bytes"] > 0
