"""What LoRA does in training alone: dropout against peft's, how A begins, and that every parameter gets a gradient."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from adapting import CONFIG, IDS, SIZES, base_in, disturbed, run
from fw.assemble import assemble
from fw.config import load
from fw.kinds.model import CausalLM
from fw.recipe import World, resolve
from fw.training import module

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

LLAMA = transformers.LlamaConfig(**SIZES, num_key_value_heads=2)


def assembled(directory: Path, section: dict[str, Any]) -> CausalLM:
    """The model as training begins with it."""
    (directory / "run.yaml").write_text(CONFIG.format(base=directory / "base", peft=json.dumps(section)))
    recipe = resolve(load(str(directory / "run.yaml"), []), World())
    return assemble(recipe, SIZES["vocab_size"], None, torch.device("cpu")).model


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "v_proj", "gate_proj", "down_proj"]])
@pytest.mark.parametrize("name", ["lora", "dora"])
def test_dropout_is_that_of_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, targets: list[str]) -> None:
    """Of the same random numbers: logits, and the gradients of all that trains."""
    monkeypatch.chdir(tmp_path)
    options = {"r": 4, "lora_alpha": 16, "target_modules": targets, "lora_dropout": 0.4, "use_dora": name == "dora"}
    theirs = disturbed(peft.get_peft_model(base_in(tmp_path, LLAMA), peft.LoraConfig(task_type="CAUSAL_LM", **options)), 0.1).train()
    theirs.save_pretrained(tmp_path / "adapter")
    section = {"name": name, "rank": 4, "alpha": 16, "targets": targets, "dropout": 0.4, "adapter": str(tmp_path / "adapter")}
    ours = assembled(tmp_path, section).train()
    torch.manual_seed(3)
    expected = theirs(IDS).logits
    torch.manual_seed(3)
    found = ours(IDS)
    assert (found - expected).abs().max() < 1e-5
    for logits in (expected, found):
        logits.square().sum().backward()
    trains = {key.replace(".default", ""): p for key, p in theirs.named_parameters() if p.requires_grad}
    gradients = {key.replace("magnitude_vector.weight", "magnitude_vector"): p.grad for key, p in trains.items()}
    assert ours.adapters is not None and len(ours.adapters.tensors) == len(gradients)
    for key, of in ours.adapters.tensors.items():
        found_grad, wanted = ours.get_parameter(key).grad, gradients[of.name]
        assert found_grad is not None and (found_grad - wanted).abs().max() <= 5e-5 * wanted.abs().max().clamp(min=1), key
    with torch.no_grad():
        assert (ours.eval()(IDS) - theirs.eval()(IDS).logits).abs().max() < 1e-5
        assert (ours(IDS) - found).abs().max() > 1e-3, "dropout has done something"


@pytest.mark.parametrize("init", ["uniform", "normal"])
def test_how_a_and_b_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, init: str) -> None:
    """As peft does: its moments and bounds, of many values."""
    monkeypatch.chdir(tmp_path)
    wide = transformers.LlamaConfig(**{**SIZES, "hidden_size": 512}, num_key_value_heads=2)
    begun = {"uniform": True, "normal": "gaussian"}[init]
    torch.manual_seed(0)
    options = peft.LoraConfig(r=8, target_modules=["q_proj"], init_lora_weights=begun)
    theirs = peft.get_peft_model(base_in(tmp_path, wide), options)
    theirs_A = torch.cat([p.flatten() for key, p in theirs.named_parameters() if "lora_A" in key])
    ours = assembled(tmp_path, {"name": "lora", "rank": 8, "targets": ["q_proj"], "init": init})
    each = [p.detach() for key, p in ours.named_parameters() if key.endswith("lora_A")]
    assert len(each) == 2 and not torch.equal(each[0], each[1])
    ours_A = torch.cat([p.flatten() for p in each])
    assert all(not p.any() for key, p in ours.named_parameters() if key.endswith("lora_B"))
    assert ours_A.numel() == theirs_A.numel() == 8192
    assert abs(ours_A.mean()) < 0.05 * theirs_A.std()
    assert abs(ours_A.std() / theirs_A.std() - 1) < 0.05
    bound = 512**-0.5
    assert (theirs_A.abs().max() <= bound) == (ours_A.abs().max() <= bound) == (init == "uniform")
    for part in (0.1, 0.25, 0.75, 0.9):
        assert abs(ours_A.quantile(part) - theirs_A.quantile(part)) < 0.1 * theirs_A.std(), part


def test_a_parameter_that_no_gradient_reaches_ends_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A layer that computes without its change."""
    base_in(tmp_path, LLAMA)
    section = {"name": "lora", "rank": 4, "targets": ["q_proj", "v_proj"]}

    def without(*given: Any) -> Any:
        made = assemble(*given)
        layer: Any = made.model.get_submodule("layers.1.self_attn.v_proj")
        layer.forward = lambda x: linear(x, layer.weight)
        return made

    assert run(tmp_path, monkeypatch, section) == 0, "B is zero, so A's first gradient is, too: it has come all the same"
    capsys.readouterr()
    monkeypatch.setattr(module, "assemble", without)
    assert run(tmp_path, monkeypatch, section, "train.run_dir=other") == 1
    said = capsys.readouterr().err
    assert "no gradient reaches layers.1.self_attn.v_proj.lora_A, layers.1.self_attn.v_proj.lora_B, which peft is to train" in said
    assert not list((tmp_path / "other" / "checkpoints").glob("step*")), "it ends in the first step"
