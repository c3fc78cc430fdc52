"""A frozen base that a GPU has no room for: gradients to the last bit, whenever a copy is made and whatever is computed again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from fw.checkpointing import streaming
from fw.checkpointing.elsewhere import allocate, announce, chosen_elsewhere
from fw.checkpointing.placement import quantizing
from fw.checkpointing.quantized_files import weights_of
from fw.checkpointing.streaming import expect, stream
from fw.checkpointing.tensor_files import weights_for
from fw.kernels.copies import Copy, Lane
from fw.kinds import make
from fw.kinds.offload import OffloadPolicy
from fw.kinds.peft import PeftPlugin
from fw.meter.allocations import allocations
from fw.pretrained.load import structure
from fw_plugins.offload.activations import offload
from fw_plugins.offload.disk_store import DiskStore
from models.architectures import VOCABULARY, save
from plugins.test_activation import SPEC, plugin as recomputation
from pretrained.lanes import CPU, IN_FILES, ON_HOST, Late, logits, made, size


def adapted(place: Path, policy: OffloadPolicy | None, activation: str, quantization: str = "none", **options):
    """With LoRA on all layers, whose values are not those that it begins with, as training assembles it."""
    model, weights, _ = structure(place, torch.float32, quantization=quantization)
    with torch.device("meta"):
        model.adapters = make(PeftPlugin, "lora", rank=3, targets=["all-linear"]).apply(model)
    announce(model, chosen_elsewhere(model, weights, True, policy), True)
    allocate(model)
    if model.elsewhere:
        expect(model)
    recomputation(activation, **options).apply(model, SPEC, 32)
    model.materialise(CPU)
    filling = weights_for(weights_of(weights), model)
    added = model.adapters.added
    quantizing(filling, model, filling.codes, filling.done)(
        {n: t for n, t in model.stored().items() if n not in added and n not in model.in_files}
    )
    torch.manual_seed(0)
    for name in sorted(added):
        torch.nn.init.normal_(model.get_parameter(name), std=0.1)
    stream(model, CPU)
    return model.train()


def gradients(model, between: bool = True) -> dict[str, Tensor]:
    """Of two micro-batches, and a forward without any between them."""
    model.zero_grad()
    for at in (0, 7):
        model(torch.arange(at, at + 24).view(2, 12) % VOCABULARY).square().mean().backward()
        if between:
            logits(model)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


RECOMPUTED = {
    "none": {},
    "full": {},
    "every_n": {"n": 2},
    "sqrt": {},
    "selective": {},
    "modules": {"patterns": ["*.mlp", "*.1.*norm*"]},
    "modules, layers": {"patterns": ["*_proj"]},
}


@pytest.mark.parametrize("lane", [Lane, Late])
@pytest.mark.parametrize("way", RECOMPUTED)
def test_gradients_through_a_frozen_base(tmp_path, monkeypatch, way, lane):
    """Autograd keeps no weight: in backward its place has another block's."""
    made(tmp_path, 5)
    expected = gradients(adapted(tmp_path, None, "none"))
    monkeypatch.setattr(streaming, "Lane", lane)
    for policy in (ON_HOST, IN_FILES, OffloadPolicy(params="cpu", modules=("layers.[024]*",))):
        found = gradients(adapted(tmp_path, policy, way.partition(",")[0], **RECOMPUTED[way]))
        assert found.keys() == expected.keys() and len(found) == 5 * 7 * 2
        assert all(torch.equal(found[name], expected[name]) for name in found)


class Threaded(Lane):
    """Copies at once. What comes of files is read by a thread, which does nothing before somebody waits for it, or for another copy to the
    same place: at the worst moment."""

    waiting: ClassVar[list[tuple[int, Callable[[], None]]]] = []

    def now(self):
        return object(), None

    def copy(self, target: Tensor, source: Tensor, after=None) -> Copy:
        target.copy_(source)
        return ThreadedCopy(target)

    @classmethod
    def catch_up(cls, place: int | None = None) -> None:
        late = [entry for entry in cls.waiting if place in (None, entry[0])]
        for entry in late:
            cls.waiting.remove(entry)
            entry[1]()


class ThreadedCopy(Copy):
    def __init__(self, target: Tensor) -> None:
        self.place = target.untyped_storage().data_ptr()

    def wait(self) -> None:
        Threaded.catch_up(self.place)

    def done(self) -> None:
        """It is."""


class LateThread:
    def __init__(self, *_) -> None:
        """One at a time."""

    def submit(self, read, number, *given) -> Future:
        future: Future = Future()
        place = read.__self__._weights[number][0].target.untyped_storage().data_ptr()
        Threaded.waiting.append((place, lambda: future.set_result(read(number, *given))))
        result = future.result

        def caught_up() -> Copy:
            Threaded.catch_up()
            return result()

        future.result = caught_up
        return future


def test_what_nobody_waited_for_is_not_late(tmp_path, monkeypatch):
    """A backward ends above the first blocks, one of which it has fetched from a file; the next forward wants that one's place."""
    made(tmp_path, 7)

    def upper(policy: OffloadPolicy | None):
        model = adapted(tmp_path, policy, "none")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and int(name.split(".")[1]) > 3 if name.startswith("layers.") else False)
        return model

    whole = upper(None)
    expected = [gradients(whole, between=False) for _ in range(3)]
    monkeypatch.setattr(streaming, "Lane", Threaded)
    monkeypatch.setattr(streaming, "ThreadPoolExecutor", LateThread)
    model = upper(OffloadPolicy(params="nvme", host_budget=size(tmp_path, 3)))
    for wanted in expected:
        found = gradients(model, between=False)
        assert len(wanted) == 3 * 7 * 2 and all(torch.equal(found[name], grad) for name, grad in wanted.items())


@pytest.mark.parametrize("case", ["qwen3", "gemma2", "gpt2", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("activation", ["none", "full"])
def test_gradients_of_other_models(tmp_path, monkeypatch, case, activation):
    save(case, tmp_path)
    expected = gradients(adapted(tmp_path, None, "none"))
    monkeypatch.setattr(streaming, "Lane", Late)
    found = gradients(adapted(tmp_path, ON_HOST, activation))
    assert expected and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("activation", ["none", "full"])
def test_gradients_through_codes(tmp_path, monkeypatch, activation):
    made(tmp_path, 5)
    expected = gradients(adapted(tmp_path, None, "none", "nf4"))
    monkeypatch.setattr(streaming, "Lane", Late)
    found = gradients(adapted(tmp_path, ON_HOST, activation, "nf4"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_activations_may_be_offloaded_beside(tmp_path, monkeypatch):
    """Whoever sets hooks on saved tensors gets all but weights."""
    made(tmp_path, 5)
    expected = gradients(adapted(tmp_path, None, "none"))
    model = adapted(tmp_path, ON_HOST, "none")
    offload(model.blocks, DiskStore(tmp_path), 64, ahead=1)
    found = gradients(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture
def nothing_collected():
    """What is left of other tests would be counted as freed by whatever runs when Python collects it."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("nothing_collected")
def test_what_forward_keeps(tmp_path):
    """No weight: as much as without streaming, where weights are kept as they are."""
    made(tmp_path, 5)
    kept = []
    for policy in (None, ON_HOST):
        model = adapted(tmp_path, policy, "none")
        gradients(model)
        with allocations(CPU) as found:
            loss = model(torch.arange(24).view(2, 12)).square().mean()
            found.mark("forward")
            loss.backward()
        kept.append((found.marks["forward"], found.peak_bytes))
        del model, loss  # else the first's graph, and what it alone keeps, would end amid the second's forward
    assert kept[1] == kept[0], "what autograd keeps of numbers is a tensor's only where hooks see it"
