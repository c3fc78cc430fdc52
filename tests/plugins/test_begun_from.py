"""Training that begins from an adapter of peft's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fw
from adapting import IDS, SIZES, base_in, checkpoint, disturbed, run

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

QWEN2 = transformers.Qwen2Config(**SIZES, num_key_value_heads=2)
TARGETS = ["q_proj", "v_proj", "down_proj"]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora": (
        {"peft_type": "LORA", "r": 4, "lora_alpha": 12, "use_rslora": True, "rank_pattern": {"v_proj": 2}, "lora_dropout": 0.3},
        {"name": "lora", "rank": 4, "alpha": 12, "rslora": True, "ranks": {"v_proj": 2}, "targets": TARGETS},
    ),
    "dora": (
        {"peft_type": "LORA", "r": 4, "lora_alpha": 12, "use_dora": True},
        {"name": "dora", "rank": 4, "alpha": 12, "targets": TARGETS},
    ),
    "ia3": (
        {"peft_type": "IA3", "feedforward_modules": ["q_proj", "down_proj"]},
        {"name": "ia3", "targets": TARGETS, "feedforward": ["down_proj", "q_proj"]},
    ),
    "LOHA": (
        {"peft_type": "LOHA", "r": 4, "alpha": 6, "init_weights": False, "rank_pattern": {"v_proj": 2}},
        {"name": "hf_peft", "type": "LOHA", "config": {"r": 4, "alpha": 6, "rank_pattern": {"v_proj": 2}, "target_modules": TARGETS}},
    ),
    "LORA": (
        {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "lora_bias": True, "layers_to_transform": [1]},
        {
            "name": "hf_peft",
            "type": "LORA",
            "config": {"r": 4, "lora_alpha": 6, "lora_bias": True, "target_modules": TARGETS, "layers_to_transform": [1]},
        },
    ),
    "DEFT": (  # which begins from the base's weights by itself, but not here
        {"peft_type": "DEFT", "r": 4},
        {"name": "hf_peft", "type": "DEFT", "config": {"r": 4, "target_modules": TARGETS}},
    ),
    "PSOFT": (  # of which a file holds less than there is
        {"peft_type": "PSOFT", "r": 4, "ab_svd_init": "pissa_init"},
        {"name": "hf_peft", "type": "PSOFT", "config": {"r": 4, "ab_svd_init": "pissa_init", "target_modules": TARGETS}},
    ),
    "OFT": (
        {"peft_type": "OFT", "oft_block_size": 8, "use_cayley_neumann": False},
        {"name": "hf_peft", "type": "OFT", "config": {"oft_block_size": 8, "use_cayley_neumann": False, "target_modules": TARGETS}},
    ),
}


def adapted(directory: Path, options: dict[str, Any]) -> Any:
    """A model of peft's whose adapter is in ``adapter``."""
    targets = TARGETS if not options.get("lora_bias") else TARGETS[:2]  # which have biases
    config = peft.get_peft_config({"task_type": "CAUSAL_LM", "target_modules": targets, **options})
    model = disturbed(peft.get_peft_model(base_in(directory, QWEN2), config), 0.1)
    model.save_pretrained(directory / "adapter")
    return model


def begun(case: str, **changes: Any) -> dict[str, Any]:
    """The section that means what peft was told."""
    section = json.loads(json.dumps(CASES[case][1]))
    if case == "LORA":
        section["config"]["target_modules"] = TARGETS[:2]
    where = section["config"] if section["name"] == "hf_peft" else section
    where |= changes
    return {**section, "adapter": "adapter"}


@pytest.mark.parametrize("case", CASES)
def test_it_begins_with_the_values_of_the_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    theirs = adapted(tmp_path, CASES[case][0])
    assert run(tmp_path, monkeypatch, begun(case), "optimizer.lr=0") == 0
    read = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    written = load_file(checkpoint(tmp_path) / "adapter_model.safetensors")
    assert written.keys() == read.keys() and all(torch.equal(written[name], read[name]) for name in read)
    with torch.no_grad():
        assert (fw.load_model(checkpoint(tmp_path))(IDS) - theirs(IDS).logits).abs().max() < 1e-5


@pytest.mark.parametrize("case", ["lora", "ia3", "LOHA"])
def test_it_learns_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Adam's first step is of the learning rate for every number, so that where it ends shows where it began; peft reads what comes out."""
    theirs = adapted(tmp_path, {**CASES[case][0], **({"lora_dropout": 0.0} if case == "lora" else {})})
    options = ["optimizer.lr=1e-3", "optimizer.weight_decay=0", "train.max_steps=1", "train.save_every=1", "train.gradient_clip_norm=0"]
    assert run(tmp_path, monkeypatch, begun(case), *options, "schedule=constant") == 0
    read = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    written = load_file(checkpoint(tmp_path) / "adapter_model.safetensors")
    moved = torch.cat([(written[name] - read[name]).flatten() for name in read]).abs()
    assert moved.max() < 1.001e-3 and (moved > 0.9e-3).float().mean() > 0.9
    back = peft.PeftModel.from_pretrained(theirs.unload(), checkpoint(tmp_path)).eval()
    with torch.no_grad():
        assert (fw.load_model(checkpoint(tmp_path))(IDS) - back(IDS).logits).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("case", "changes", "says"),
    [
        ("lora", {"alpha": 13}, "was trained with lora_alpha=12, the config means 13"),
        ("lora", {"rslora": False}, "was trained with use_rslora=True, the config means False"),
        ("lora", {"ranks": {}}, "was trained with rank_pattern={'v_proj': 2}, the config means {}"),
        ("dora", {"name": "lora"}, "was trained with use_dora=True, the config means False"),
        ("ia3", {"feedforward": ["down_proj"]}, "was trained with feedforward_modules="),
        ("ia3", {"targets": ["q_proj", "v_proj"]}, "was trained with feedforward_modules="),
        ("LOHA", {"alpha": 7}, "was trained with alpha=6, the config means 7"),
        ("LOHA", {"rank_pattern": {}}, "was trained with rank_pattern={'v_proj': 2}, the config means {}"),
        ("LOHA", {"use_effective_conv2d": True}, "was trained with use_effective_conv2d=False, the config means True"),
        ("LORA", {"use_rslora": True}, "was trained with use_rslora=False, the config means True"),
        ("OFT", {"use_cayley_neumann": True}, "was trained with use_cayley_neumann=False, the config means True"),
        ("LOHA", {"target_modules": ["q_proj"]}, "v_proj"),
    ],
)
def test_what_was_trained_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str, changes: dict[str, Any], says: str
) -> None:
    adapted(tmp_path, CASES[case][0])
    assert run(tmp_path, monkeypatch, begun(case, **changes)) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("case", ["lora", "ia3", "LOHA"])
def test_an_adapter_of_another_method_or_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    adapted(tmp_path, CASES["lora" if case != "lora" else "LOHA"][0])
    assert run(tmp_path, monkeypatch, begun(case)) == 2
    assert "was trained with peft_type=" in capsys.readouterr().err
    assert run(tmp_path, monkeypatch, {**begun(case), "adapter": "nowhere"}) == 2
    assert "peft.adapter: " in capsys.readouterr().err


@pytest.mark.parametrize(("method", "name"), [("PROMPT_TUNING", "prompt"), ("PREFIX_TUNING", "prefix")])
def test_virtual_tokens_begin_as_those_of_the_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], method: str, name: str
) -> None:
    base = base_in(tmp_path, QWEN2)
    options = peft.get_peft_config({"peft_type": method, "task_type": "CAUSAL_LM", "num_virtual_tokens": 3})
    disturbed(peft.get_peft_model(base, options), 0.1).save_pretrained(tmp_path / "adapter")
    assert run(tmp_path, monkeypatch, {"name": name, "tokens": 3, "adapter": "adapter"}, "optimizer.lr=0") == 0
    read = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    written = load_file(checkpoint(tmp_path) / "adapter_model.safetensors")
    assert written.keys() == read.keys() and all(torch.equal(written[key], read[key]) for key in read)
    assert run(tmp_path, monkeypatch, {"name": name, "tokens": 4, "adapter": "adapter"}) == 2
    assert "was trained with num_virtual_tokens=3, the config means 4" in capsys.readouterr().err


def test_bottlenecks_begin_as_those_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    base_in(tmp_path, QWEN2)
    assert run(tmp_path, monkeypatch, {"name": "adapter", "size": 4}) == 0
    first = checkpoint(tmp_path)
    assert run(tmp_path, monkeypatch, {"name": "adapter", "size": 4, "adapter": str(first)}, "optimizer.lr=0", "train.run_dir=second") == 0
    read, written = (load_file(run / "adapter_model.safetensors") for run in (first, tmp_path / "second" / "checkpoints" / "latest"))
    assert written.keys() == read.keys() and all(torch.equal(written[key], read[key]) for key in read)
    assert any(tensor.abs().max() > 0 for name, tensor in written.items() if "up" in name)  # which begins at zero by itself
    assert run(tmp_path, monkeypatch, {"name": "adapter", "size": 4, "scale": 2.0, "adapter": str(first)}, "train.run_dir=third") == 2
    assert "peft.adapter: " in capsys.readouterr().err
