"""Dividing and offloading on CUDA: kernels of the ring, tiers of memory, meshes where there are GPUs enough."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from conftest import column, fw

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CUDA = "launch.accelerator=cuda"


@pytest.fixture
def one_rank():
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,), mesh_dim_names=("context",))
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_rings_kernels_equal_sdpa(one_rank, dtype):
    from fw_plugins.sharding.ring_attention import has_kernel, ring_attention

    shapes = [(2, 8, 256, 64), (2, 2, 256, 64), (2, 2, 256, 64)]
    ours = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]
    theirs = [x.detach().clone().requires_grad_() for x in ours]
    assert has_kernel(ours[0]) and not has_kernel(ours[0].float())
    out = ring_attention(*ours, 0.125, one_rank)
    expected = F.scaled_dot_product_attention(*theirs, is_causal=True, scale=0.125, enable_gqa=True)
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
    cotangent = torch.randn_like(out)
    out.backward(cotangent)
    expected.backward(cotangent)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=5e-2, rtol=5e-2)


AWAY = {
    "optimizer on the host": ["offload.optimizer=cpu"],
    "gradients too": ["offload.optimizer=cpu", "offload.gradients=cpu"],
    "optimizer on disk": ["offload.optimizer=nvme", "offload.path=disk"],
    "activations on the host": ["offload.activations=cpu", "offload.activations_above=1KiB"],
    "activations on disk": ["offload.activations=nvme", "offload.activations_above=1KiB", "offload.path=disk"],
}
LARGE = [
    "model.num_hidden_layers=8",
    "model.hidden_size=256",
    "model.intermediate_size=1024",
    "train.max_steps=5",
    "train.sequence_length=512",
]


@pytest.mark.parametrize("sharding", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize("away", AWAY)
def test_what_is_away_changes_memory_and_nothing_else(workspace, sharding, away):
    ranks = [f"sharding={sharding}", CUDA, *LARGE]
    fw("train", "tiny.yaml", *ranks, "train.run_dir=here").ok()
    fw("train", "tiny.yaml", *ranks, *AWAY[away], "train.run_dir=away").ok()
    assert column("away", "loss") == pytest.approx(column("here", "loss"), rel=1e-4)
    assert column("away", "peak_memory_bytes")[-1] < column("here", "peak_memory_bytes")[-1]


def test_fsdp_with_everything_on_the_host(workspace):
    away = ["offload.params=cpu", "offload.gradients=cpu", "offload.optimizer=cpu"]
    fw("train", "tiny.yaml", CUDA, "sharding=fsdp", *LARGE, "train.run_dir=here").ok()
    fw("train", "tiny.yaml", CUDA, "sharding=fsdp", *LARGE, *away, "train.run_dir=away", "train.save_every=5").ok()
    assert column("away", "loss") == pytest.approx(column("here", "loss"), rel=1e-4)
    assert column("away", "peak_memory_bytes")[-1] < column("here", "peak_memory_bytes")[-1]


@pytest.mark.parametrize("mesh", ["tensor: 2", "context: 2", "context_method: ring, context: 2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_meshes_equal_one_rank(workspace, mesh, precision):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    if "ring" in mesh and precision == "fp32":
        pytest.skip("the flash kernel takes halves only")
    fw("train", "tiny.yaml", CUDA, f"precision={precision}", "train.run_dir=one").ok()
    fw(
        "train", "tiny.yaml", CUDA, f"precision={precision}", f"sharding={{name: fsdp, {mesh}}}", "launch.devices=2", "train.run_dir=two"
    ).ok()
    tolerance = 1e-4 if precision == "fp32" else 2e-2
    assert column("two", "loss") == pytest.approx(column("one", "loss"), rel=tolerance)
