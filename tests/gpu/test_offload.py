"""Activations in page-locked host memory, copied on streams of their own: the bits of a run without, and the bytes it is for."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fw.checkpointing.placement import initialise
from fw.kinds.model import CausalLM
from fw_models.llama import Llama, LlamaConfig
from fw_plugins.attention.sdpa import SDPAttention
from fw_plugins.offload.activations import offload
from fw_plugins.offload.disk_store import DiskStore
from fw_plugins.offload.host_store import HostStore
from plugins.test_activation import SPEC, plugin

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
LENGTH, BLOCKS = 512, 12
IDS = torch.arange(4 * LENGTH).view(4, LENGTH) * 7 % 1000


def build(activation: str = "none") -> CausalLM:
    with torch.device("meta"):
        model = Llama(LlamaConfig(256, BLOCKS, 4, intermediate_size=688), 1000, LENGTH, SDPAttention(None))
    plugin(activation).apply(model, SPEC, LENGTH)
    model.materialise(torch.device("cuda"))
    for name, tensor in model.named_parameters():
        initialise(tensor.data, name, model.init(name), 0)
    return model


def loss_of(model: CausalLM) -> Tensor:
    return model(IDS.cuda(), readout=lambda x, head, extra: x.float().square().mean())


def trained(model: CausalLM) -> tuple[list[Tensor], int, int]:
    """Gradients of the third step, the most bytes it took beyond what was there, and the bytes between forward and backward."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            loss = loss_of(model)
            between = torch.cuda.memory_allocated() - before
            loss.backward()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del loss
        # The first step leaves cuBLAS its workspaces.
        assert step == 0 or torch.cuda.memory_allocated() - before < 1 << 20, "nothing is left behind"
    torch.use_deterministic_algorithms(False)
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], peak, between


@pytest.mark.parametrize("activation", ["none", "full", "sqrt"])
def test_gradients_are_the_same_bits_and_memory_falls(activation):
    expected, most, kept = trained(build())
    for ahead in (0, 1, 3):
        model = build(activation)
        offload(model.blocks, HostStore(), 1 << 16, ahead)
        found, peak, between = trained(model)
        assert all(map(torch.equal, found, expected)), ahead
        # What two blocks have stored last is still there.
        assert between < 4 * kept / BLOCKS, (ahead, between, kept)
        assert peak < most * (0.6 if ahead < 2 else 0.8), (ahead, peak, most)


def test_twice_over_one_graph_and_never():
    expected, *_ = trained(build())
    model = build()
    offload(model.blocks, HostStore(), 1 << 16, 1)
    before = torch.cuda.memory_allocated()
    loss_of(model)
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 1 << 20, "a graph that is dropped leaves nothing"
    torch.use_deterministic_algorithms(True, warn_only=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        loss = loss_of(model)
        for again in (True, False):
            model.zero_grad()
            loss.backward(retain_graph=again)
            assert all(map(torch.equal, (torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()), expected))
    torch.use_deterministic_algorithms(False)


def test_copies_are_on_streams_of_their_own():
    model = build()
    offload(model.blocks, HostStore(), 1 << 16, 1)
    trained(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        loss_of(model).backward()
        torch.cuda.synchronize()
    streams: dict[str, dict[int, set[str]]] = {"DtoH": {}, "HtoD": {}, "kernel": {}}
    for event in profile.profiler.kineto_results.events():
        name = event.name()
        if event.device_type() == torch.autograd.DeviceType.CUDA and "Wait" not in name and "Sync" not in name:
            pinned = "Pinned" in name
            what = "DtoH" if pinned and "DtoH" in name else "HtoD" if pinned and "HtoD" in name else "kernel"
            if "Mem" not in name or pinned:
                streams[what].setdefault(event.device_resource_id(), set()).add(name[:60])
    away, back, compute = (set(streams[what]) for what in ("DtoH", "HtoD", "kernel"))
    assert away and back and compute, streams
    assert not away & back and not (away | back) & compute, streams


def test_files_serve_a_gpu_too(tmp_path: Path):
    expected, *_ = trained(build())
    model = build()
    offload(model.blocks, DiskStore(tmp_path), 1 << 16, 1)
    found, *_ = trained(model)
    assert all(map(torch.equal, found, expected))
