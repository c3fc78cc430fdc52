"""Optimizers with state in pages: the numbers of those without, everything of size in a page, and what there is to say."""

from __future__ import annotations

import bitsandbytes
import pytest
import torch
from torch import Tensor

from conftest import column, fw
from fw.errors import UserError
from fw.kinds.offload import OffloadPolicy
from fw.kinds.optimizer import OptimizerPlugin
from fw.kinds.precision import PrecisionPolicy
from fw.kinds.sharding import StepSpec
from fw_plugins.optimizer import paged
from fw_plugins.optimizer.adamw import AdamW, AdamWConfig
from fw_plugins.optimizer.adamw_8bit import AdamW8bit, AdamW8bitConfig
from fw_plugins.optimizer.paged_adamw_8bit import PagedAdamW8bit
from fw_plugins.optimizer.paged_adamw_32bit import MomentsConfig, PagedAdamW32bit
from fw_plugins.sharding.torch_stepper import TorchStepper
from plugins.test_stepper import batches, loss_of, model

CPU, FP32 = torch.device("cpu"), PrecisionPolicy(torch.float32, torch.float32, torch.float32)
PAIRS = {
    "8bit": (PagedAdamW8bit(AdamW8bitConfig(lr=1e-2)), AdamW8bit(AdamW8bitConfig(lr=1e-2))),
    "32bit": (PagedAdamW32bit(MomentsConfig(lr=1e-2)), AdamW(AdamWConfig(lr=1e-2))),
}


def stepper(plugin: OptimizerPlugin) -> TorchStepper:
    return TorchStepper(model(), StepSpec(FP32, OffloadPolicy(), plugin.spec(CPU), 0.5))


def train(one: TorchStepper, ids: list[Tensor]) -> TorchStepper:
    for batch in ids:
        one.backward(loss_of(one.module, batch))
        one.step(1.0)
    return one


def equal(one: TorchStepper, other: TorchStepper) -> bool:
    a, b = ({**dict(s.parameters()), **s.optimizer_tensors()} for s in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_the_bits_of_the_same_without_pages(pair):
    """Resumed from its own state, and from that of the other: what a checkpoint holds is the same."""
    ids = batches(6)
    expected = train(stepper(pair[1]), ids)
    assert equal(train(stepper(pair[0]), ids), expected)
    for half in pair:
        first = train(stepper(half), ids[:3])
        second = stepper(pair[0])
        second.module.load_state_dict(first.module.state_dict())
        second.placements()
        second.load_optimizer_tensors({name: tensor.clone() for name, tensor in first.optimizer_tensors().items()})
        assert equal(train(second, ids[3:]), expected)


class Pages:
    """bitsandbytes' functions, over host memory, and what they were asked for."""

    def __init__(self) -> None:
        self.made: list[Tensor] = []
        self.asked: list[int] = []

    def get_paged(self, *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
        page = torch.full(shape, 7, dtype=dtype)
        page.is_paged = True
        self.made.append(page)
        return page

    def prefetch_tensor(self, page: Tensor, to_cpu: bool = False) -> None:
        assert page.is_paged and not to_cpu
        self.asked.append(page.data_ptr())

    def addresses(self) -> list[int]:
        return [page.data_ptr() for page in self.made]


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Pages:
    made = Pages()
    monkeypatch.setattr(paged, "pages_on", lambda device: True)
    monkeypatch.setattr(paged, "on_device", lambda page, device: page)
    monkeypatch.setattr(bitsandbytes.cextension.lib, "compiled_with_cuda", True)
    for name in ("get_paged", "prefetch_tensor"):
        monkeypatch.setattr(bitsandbytes.functional, name, getattr(made, name))
    return made


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((256, 1024), (512, 512), (512, 100), (64,))]


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_all_state_of_size_is_in_pages(pages, pair):
    made = []
    for plugin in pair:
        spec = plugin.spec(CPU)
        weights = parameters()
        optimizer = spec.cls(weights, lr=spec.lr, weight_decay=0.1, **spec.arguments)
        generator = torch.Generator().manual_seed(1)
        for step in range(3):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator)
            pages.asked.clear()
            optimizer.step()
            if plugin is pair[0]:
                assert sorted(pages.asked) == sorted(pages.addresses()), f"step {step} asks for each page once"
        made.append((weights, optimizer))
    (weights, optimizer), (others, other) = made
    of_size = [t for state in optimizer.state.values() for t in state.values() if t.nbytes >= 1 << 16]
    assert len(of_size) >= 6 and sorted(t.data_ptr() for t in of_size) == sorted(pages.addresses())
    for weight, plain in zip(weights, others, strict=True):
        assert torch.equal(weight, plain)
        assert all(torch.equal(optimizer.state[weight][key], other.state[plain][key]) for key in other.state[plain])


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_what_a_checkpoint_gives_goes_into_the_pages_there_are(pages, pair, monkeypatch):
    monkeypatch.setattr(paged, "_LEAST_BYTES", 256)
    first = train(stepper(pair[0]), batches(2))
    saved = {name: tensor.clone() for name, tensor in first.optimizer_tensors().items()}
    pages.made.clear()
    second = stepper(pair[0])
    second.placements()
    there = pages.addresses()
    second.load_optimizer_tensors(saved)
    found = second.optimizer_tensors()
    assert pages.addresses() == there and len(there) > 10
    assert sorted(t.data_ptr() for t in found.values() if t.nbytes >= 256) == sorted(there)
    assert found.keys() == saved.keys() and all(torch.equal(found[name], saved[name]) for name in saved)


def test_what_cannot_be_is_refused(monkeypatch):
    for plugin, name, plain in ((PAIRS["8bit"][0], "paged_adamw_8bit", "adamw_8bit"), (PAIRS["32bit"][0], "paged_adamw_32bit", "adamw")):
        for tier in ("cpu", "nvme"):
            with pytest.raises(UserError, match=rf"^offload.optimizer: {tier} takes all state there.* use optimizer={plain}, or"):
                plugin.check("cuda", OffloadPolicy(optimizer=tier))
        plugin.check("cpu", OffloadPolicy())
        with monkeypatch.context() as patch:
            patch.setattr(paged.importlib.util, "find_spec", lambda _: None)
            plugin.check("cpu", OffloadPolicy())
            with pytest.raises(UserError, match=rf"{name} takes its memory from bitsandbytes: pip install .*, or use optimizer={plain}$"):
                plugin.check("cuda", OffloadPolicy())
        with monkeypatch.context() as patch:
            patch.setattr(paged.platform, "release", lambda: "5.15.90.1-microsoft-standard-WSL2")
            with pytest.raises(UserError, match=f"needs Linux itself.*; use optimizer={plain}$"):
                plugin.check("cuda", OffloadPolicy())
        assert plugin.spec(torch.device("cuda")).note == ""


def test_a_bitsandbytes_without_cuda_is_refused(monkeypatch):
    monkeypatch.setattr(paged, "pages_on", lambda device: True)
    spec = PAIRS["8bit"][0].spec(CPU)
    with pytest.raises(UserError, match="bitsandbytes that is installed has no library for CUDA"):
        spec.cls(parameters(), lr=0.1, **spec.arguments)


@pytest.mark.parametrize(("name", "plain"), [("paged_adamw_8bit", "adamw_8bit"), ("paged_adamw_32bit", "adamw")])
def test_runs_on_the_cpu_and_says_so_once(workspace, name, plain):
    fw("train", "tiny.yaml", f"optimizer={plain}", "train.max_steps=4", "train.run_dir=plain").ok()
    said = f"fw: optimizer {name} saves nothing on the CPU, which has no pages to move; computed as {plain}\n"
    first = fw("train", "tiny.yaml", f"optimizer={name}", "train.max_steps=2", "train.save_every=2").ok()
    assert first.err.count(said) == 1
    done = fw("train", "tiny.yaml", f"optimizer={name}", "train.max_steps=4", "resume=auto", "sharding=fsdp", "launch.devices=2").ok()
    assert done.err.count(said) == 1
    assert column("run", "loss") == pytest.approx(column("plain", "loss"), rel=2e-5)
    refused = fw("train", "tiny.yaml", f"optimizer={name}", "offload.optimizer=cpu", "train.run_dir=other")
    assert refused.code == 2 and "fw: error: override offload.optimizer=cpu: offload.optimizer: cpu takes all" in refused.err
    refused = fw("train", "tiny.yaml", f"optimizer={name}", "sharding=zero", "train.run_dir=other")
    assert refused.code == 2 and ("DeepSpeed places" in refused.err or "zero joins parameters" in refused.err)
