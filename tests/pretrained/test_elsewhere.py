"""Weights that a GPU has no room for: the same logits, whenever a copy is made, and of the bytes what the budget says.

The GPU is a stand-in, whose memory is the CPU's; its streams are lanes that copy as early, or as late, as a stream may.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import fw
from fw.checkpointing import streaming
from fw.checkpointing.elsewhere import allocate, announce, check_host, chosen_elsewhere
from fw.checkpointing.placement import quantizing
from fw.checkpointing.quantized_files import weights_of
from fw.checkpointing.streaming import expect, room, stream
from fw.checkpointing.tensor_files import weights_for
from fw.errors import UserError
from fw.kernels.copies import Copy, Lane
from fw.kinds import make
from fw.kinds.offload import OffloadPolicy
from fw.kinds.peft import PeftPlugin
from fw.kinds.quantization import QuantizationPlugin
from fw.meter.allocations import allocations
from fw.planned import PlannedGPU, planning_for
from fw.pretrained.load import save_model, structure
from fw_plugins.offload.activations import offload
from fw_plugins.offload.disk_store import DiskStore
from models.architectures import CASES, VOCABULARY, save
from plugins.test_activation import SPEC, plugin as recomputation

CPU = torch.device("cpu")
ON_HOST, IN_FILES = OffloadPolicy(params="cpu"), OffloadPolicy(params="nvme")


@contextmanager
def as_on_a_gpu():
    with planning_for(PlannedGPU("stand-in", (9, 0), lambda tensor: tensor.device.type == "meta")):
        yield


class Late(Lane):
    """Copies nothing before somebody waits for it, then in the order of the lane. Its source is as it was asked for, or a test fails."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.queue: list[tuple[LateCopy, Tensor, Tensor]] = []
        self.lock = threading.Lock()

    def now(self):
        return object(), None

    def copy(self, target: Tensor, source: Tensor, after=None) -> Copy:
        with self.lock:
            copy = LateCopy(self)
            self.queue.append((copy, target, source))
            return copy


class LateCopy(Copy):
    def __init__(self, lane: Late) -> None:
        self.lane, self.is_done = lane, False

    def wait(self) -> None:
        with self.lane.lock:
            while not self.is_done:
                copy, target, source = self.lane.queue.pop(0)
                target.copy_(source)
                copy.is_done = True

    def done(self) -> None:
        self.wait()


def loaded(place: Path, policy: OffloadPolicy | None = None, **options):
    with as_on_a_gpu():
        return fw.load_model(place, offload=policy, **options)


def logits(model) -> Tensor:
    """Of three prompts, one after another: what is left of one must not disturb the next."""
    with torch.no_grad():
        return torch.stack([model(torch.arange(at, at + 12)[None] % VOCABULARY) for at in (0, 5, 9)])


@pytest.mark.parametrize("lane", [Lane, Late])
@pytest.mark.parametrize("policy", [ON_HOST, IN_FILES], ids=["host", "files"])
@pytest.mark.parametrize("case", CASES)
def test_the_same_logits(tmp_path, monkeypatch, case, policy, lane):
    save(case, tmp_path)
    monkeypatch.setattr(streaming, "Lane", lane)
    found = loaded(tmp_path, policy)
    assert len(found.elsewhere) >= 2 * len(found.blocks) and not {"lm_head.weight", "embed_tokens.weight"} & found.elsewhere.keys()
    assert torch.equal(logits(found), logits(fw.load_model(tmp_path)))


def made(place: Path, layers: int, dtype: torch.dtype = torch.float32) -> Path:
    """A Llama of so many blocks, all of whose matrices differ."""
    torch.manual_seed(layers)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**CASES["llama"], "num_hidden_layers": layers})).to(dtype).save_pretrained(
        place
    )
    return place


@pytest.mark.parametrize("lane", [Lane, Late])
@pytest.mark.parametrize("layers", [1, 2, 3, 4, 7])
def test_of_any_number_of_blocks(tmp_path, monkeypatch, layers, lane):
    """An odd number has its first and its last block in the same place."""
    made(tmp_path, layers)
    monkeypatch.setattr(streaming, "Lane", lane)
    for policy in (ON_HOST, IN_FILES, OffloadPolicy(params="nvme", host_budget=size(tmp_path, 1) * (layers // 2))):
        assert torch.equal(logits(loaded(tmp_path, policy)), logits(fw.load_model(tmp_path)))


def size(place: Path, blocks: int) -> int:
    """Bytes of the matrices of so many blocks."""
    model, *_ = structure(place, torch.float32)
    return blocks * sum(p.numel() * p.element_size() for p in model.blocks[0].parameters() if p.dim() > 1)


def on_device(model) -> int:
    """Bytes of what its parameters lie in."""
    return sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}.values())


def test_what_a_budget_keeps(tmp_path):
    """As many blocks as fit beside room for two; those that leave are spread evenly."""
    made(tmp_path, 9)
    whole, block = on_device(fw.load_model(tmp_path)), size(tmp_path, 1)
    assert room(p for p in fw.load_model(tmp_path).blocks[0].parameters() if p.dim() > 1) == block, "no gaps here"
    for budget, leaving in (
        (whole, []),
        (whole - 1, [1, 4, 7]),
        (whole - block, [1, 4, 7]),
        (whole - block - 1, [1, 3, 5, 7]),
        (whole - 2 * block, [1, 3, 5, 7]),
        (whole - 7 * block, list(range(9))),
    ):
        model = loaded(tmp_path, OffloadPolicy(params="cpu", budget=budget))
        assert sorted({int(name.split(".")[1]) for name in model.elsewhere}) == leaving
        assert on_device(model) == whole - max(0, len(leaving) - 2) * block <= budget
        assert torch.equal(logits(model), logits(fw.load_model(tmp_path)))
    with pytest.raises(UserError, match=r"offload.budget: .* are the least that weights take here: .*; raise it"):
        loaded(tmp_path, OffloadPolicy(params="cpu", budget=whole - 7 * block - 1))


def test_host_memory_first_then_files(tmp_path):
    made(tmp_path, 6)
    block = size(tmp_path, 1)
    model = loaded(tmp_path, OffloadPolicy(params="nvme", host_budget=4 * block + block // 2))
    assert sorted({name.split(".")[1] for name in model.in_files}) == ["4", "5"]
    assert sorted({name.split(".")[1] for name in model.elsewhere.keys() - model.in_files.keys()}) == ["0", "1", "2", "3"]
    assert torch.equal(logits(model), logits(fw.load_model(tmp_path)))


def test_some_by_name(tmp_path):
    made(tmp_path, 5)
    model = loaded(tmp_path, OffloadPolicy(params="cpu", modules=("layers.1", "layers.[34].mlp.up*")))
    names = {name for name in dict(model.named_parameters()) if name.startswith("layers.1.") and "norm" not in name}
    assert model.elsewhere.keys() == names | {"layers.3.mlp.up_proj.weight", "layers.4.mlp.up_proj.weight"}
    assert torch.equal(logits(model), logits(fw.load_model(tmp_path)))


@pytest.mark.parametrize("quantization", ["nf4", "fp4", "w8a16", "w4a16"])
def test_codes_leave_too(tmp_path, quantization):
    """Only to host memory: files hold none. What becomes of the weights is the same."""
    made(tmp_path, 5, torch.bfloat16)
    options = {"w8a16": {"group_size": 16}, "w4a16": {"group_size": 16}}.get(quantization, {})
    plugin = make(QuantizationPlugin, quantization, **options)
    found = loaded(tmp_path, ON_HOST, quantization=plugin)
    codes = {name for weight in found.quantized.values() for name in weight.kept}
    assert codes and codes <= found.elsewhere.keys()
    assert torch.equal(logits(found), logits(fw.load_model(tmp_path, quantization=plugin)))


def test_what_is_saved_is_the_weights(tmp_path):
    """And not what lies where they are brought to."""
    made(tmp_path / "in", 5)
    found = loaded(tmp_path / "in", ON_HOST)
    logits(found)
    save_model(found, tmp_path / "out")
    assert torch.equal(logits(fw.load_model(tmp_path / "out")), logits(fw.load_model(tmp_path / "in")))


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
    quantizing(filling, model, filling.codes)({n: t for n, t in model.stored().items() if n not in added and n not in model.in_files})
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
    assert kept[1] == pytest.approx(kept[0], abs=64), "what autograd keeps of numbers is a tensor's only where hooks see it"


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (OffloadPolicy(params="cpu", modules=("nowhere",)), "no parameter of the model is in 'nowhere'"),
        (OffloadPolicy(params="cpu", modules=("lm_head",)), "nothing of lm_head is a matrix of a block, and only these leave a GPU"),
        (OffloadPolicy(params="cpu", modules=("layers.*norm*",)), "nothing of layers.*norm* can leave memory"),
    ],
)
def test_what_cannot_be(tmp_path, policy, says):
    made(tmp_path, 3)
    with pytest.raises(UserError, match=re.escape(says)):
        loaded(tmp_path, policy)


def test_files_in_another_dtype_are_no_help(tmp_path):
    made(tmp_path, 3, torch.bfloat16)
    with pytest.raises(UserError, match=r"as the model computes with it \(here in float32\), and .* holds none so"):
        loaded(tmp_path, IN_FILES)


def test_more_than_the_host_has(tmp_path):
    made(tmp_path, 3)
    model, *_ = structure(tmp_path, torch.float32)
    away = chosen_elsewhere(model, tmp_path, True, ON_HOST)
    check_host(away, size(tmp_path, 3))
    with pytest.raises(UserError, match=r"of weights are to lie in host memory, of which 100 B are free; .*offload.params=nvme"):
        check_host(away, 100)


def test_what_comes_of_files_is_not_overwritten_on_its_way(tmp_path, monkeypatch):
    """Waiting for a copy holds up the GPU alone: before the host fills page-locked memory again, it waits too."""
    latest: dict[int, LateCopy] = {}
    overwritten = []

    class Strict(Late):
        def copy(self, target: Tensor, source: Tensor, after=None) -> Copy:
            before = latest.get(source.data_ptr())
            overwritten.append(before is not None and not before.seen)
            latest[source.data_ptr()] = copy = super().copy(target, source, after)
            copy.seen = False
            return copy

    def done(self: LateCopy) -> None:
        self.wait()
        for copy in latest.values():  # of a lane, those before a copy are done when it is
            copy.seen = True

    made(tmp_path, 4)
    monkeypatch.setattr(streaming, "Lane", Strict)
    monkeypatch.setattr(LateCopy, "done", done)
    assert torch.equal(logits(loaded(tmp_path, IN_FILES)), logits(fw.load_model(tmp_path)))
    assert len(overwritten) > 8 * len(latest) / 2 and not any(overwritten)
