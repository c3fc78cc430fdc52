"""LoRA in mixtures of experts: routers, and layers of blocks without experts, against peft and transformers, both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fw
from adapting import IDS, SIZES, base_in, checkpoint, disturbed, run
from fw.cli import main
from fw.errors import UserError

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

CONFIGS = {
    "mixtral": transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SIZES, num_key_value_heads=2, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, mlp_only_layers=[0]
    ),
}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found = model(IDS)
    return getattr(found, "logits", found)


def plain(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory)


OPTIONS: list[dict[str, Any]] = [
    {"targets": ["all-linear"], "dropout": 0.1},
    {"targets": ["gate", "q_proj"], "ranks": {"gate": 2}, "alphas": {"gate": 3.0}},
    {"targets": [".*layers.1.*gate", "v_proj"]},
    {"targets": ["gate"]},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options["targets"]))
@pytest.mark.parametrize("name", CONFIGS)
def test_what_fw_trains_computes_the_same_in_peft_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    base_in(tmp_path, CONFIGS[name])
    assert run(tmp_path, monkeypatch, {"name": "lora", "rank": 4, **options}) == 0
    theirs = peft.PeftModel.from_pretrained(plain(tmp_path / "base"), checkpoint(tmp_path)).eval()
    loaded = {key.replace(".default", "") for key, _ in theirs.named_parameters() if ".lora_" in key}
    written = load_file(checkpoint(tmp_path) / "adapter_model.safetensors")
    assert loaded == {key.replace(".block_sparse_moe.", ".mlp.") for key in written}, "all of it, and nothing else"
    ours, expected = fw.load_model(tmp_path / "run"), logits(theirs)
    assert (logits(ours) - expected).abs().max() <= 1e-5
    assert (expected - logits(plain(tmp_path / "base"))).abs().max() > 1e-3, "and it has learnt"
    theirs.save_pretrained(tmp_path / "again")
    assert (logits(fw.load_model(tmp_path / "base", adapter=tmp_path / "again")) - expected).abs().max() <= 1e-5
    assert main(["checkpoint", "merge", "base", str(checkpoint(tmp_path)), "--to", "merged"]) == 0
    assert (logits(plain(tmp_path / "merged")) - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("targets", [["q_proj", "gate"], ["o_proj"]], ids=",".join)
@pytest.mark.parametrize("name", CONFIGS)
def test_what_peft_has_trained_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, targets: list[str]) -> None:
    base_in(tmp_path, CONFIGS[name])
    alphas = {"gate": 3, r"q_proj": 5}  # for a parameter peft wants its whole name, and lets the first one pass
    options = peft.LoraConfig(r=4, target_modules=targets, alpha_pattern=alphas)
    theirs = disturbed(peft.get_peft_model(plain(tmp_path / "base"), options), 0.3)
    theirs.save_pretrained(tmp_path / "adapter")
    expected = logits(theirs)
    assert (logits(fw.load_model(tmp_path / "base", adapter=tmp_path / "adapter")) - expected).abs().max() <= 1e-5
    assert (expected - logits(plain(tmp_path / "base"))).abs().max() > 1e-3
    monkeypatch.chdir(tmp_path)
    assert main(["checkpoint", "merge", "base", "adapter", "--to", "merged"]) == 0
    assert (logits(plain(tmp_path / "merged")) - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_training_goes_on_from_what_peft_has_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    base_in(tmp_path, CONFIGS[name])
    options = peft.LoraConfig(r=4, lora_alpha=4, target_modules=["q_proj", "gate"])
    theirs = disturbed(peft.get_peft_model(plain(tmp_path / "base"), options), 0.3)
    theirs.save_pretrained(tmp_path / "adapter")
    section = {"name": "lora", "rank": 4, "alpha": 4.0, "targets": ["q_proj", "gate"], "adapter": str(tmp_path / "adapter")}
    assert run(tmp_path, monkeypatch, section, "optimizer.lr=0") == 0
    assert (logits(fw.load_model(tmp_path / "run")) - logits(theirs)).abs().max() <= 1e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_changes_of_stacked_experts_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    base_in(tmp_path, CONFIGS[name])
    peft.get_peft_model(plain(tmp_path / "base"), peft.LoraConfig(r=4, target_modules="all-linear")).save_pretrained(tmp_path / "adapter")
    assert "gate_up_proj" in json.loads((tmp_path / "adapter/adapter_config.json").read_text())["target_parameters"]
    with pytest.raises(UserError, match="target_parameters: down_proj, gate_up_proj are stacked experts"):
        fw.load_model(tmp_path / "base", adapter=tmp_path / "adapter")
    words = ["checkpoint", "merge", str(tmp_path / "base"), str(tmp_path / "adapter"), "--to", str(tmp_path / "merged")]
    assert main(words) == 2 and "stacked experts, whose changes cannot be merged here" in capsys.readouterr().err
