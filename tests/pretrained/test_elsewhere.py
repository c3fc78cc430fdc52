"""Weights that a GPU has no room for: the same logits, whenever a copy is made, and of the bytes what the budget says.

The GPU is a stand-in, whose memory is the CPU's; its streams are lanes that copy as early, or as late, as a stream may.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

import fw
from fw.checkpointing import streaming
from fw.checkpointing.elsewhere import check_host, chosen_elsewhere
from fw.checkpointing.streaming import room
from fw.errors import UserError
from fw.kernels.copies import Copy, Lane
from fw.kinds import make
from fw.kinds.offload import OffloadPolicy
from fw.kinds.quantization import QuantizationPlugin
from fw.pretrained.load import save_model, structure
from models.architectures import CASES, save
from pretrained.lanes import IN_FILES, ON_HOST, Late, LateCopy, loaded, logits, made, size


@pytest.mark.parametrize("lane", [Lane, Late])
@pytest.mark.parametrize("policy", [ON_HOST, IN_FILES], ids=["host", "files"])
@pytest.mark.parametrize("case", CASES)
def test_the_same_logits(tmp_path, monkeypatch, case, policy, lane):
    save(case, tmp_path)
    monkeypatch.setattr(streaming, "Lane", lane)
    found = loaded(tmp_path, policy)
    assert len(found.elsewhere) >= 2 * len(found.blocks) and not {"lm_head.weight", "embed_tokens.weight"} & found.elsewhere.keys()
    assert torch.equal(logits(found), logits(fw.load_model(tmp_path)))


@pytest.mark.parametrize("lane", [Lane, Late])
@pytest.mark.parametrize("layers", [1, 2, 3, 4, 7])
def test_of_any_number_of_blocks(tmp_path, monkeypatch, layers, lane):
    """An odd number has its first and its last block in the same place."""
    made(tmp_path, layers)
    monkeypatch.setattr(streaming, "Lane", lane)
    for policy in (ON_HOST, IN_FILES, OffloadPolicy(params="nvme", host_budget=size(tmp_path, 1) * (layers // 2))):
        assert torch.equal(logits(loaded(tmp_path, policy)), logits(fw.load_model(tmp_path)))


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
