"""(IA)³ and bottleneck adapters: against peft, and against the formula."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import fw
from adapting import IDS, SIZES, base_in, checkpoint, disturbed, run, same_gradients
from fw.cli import main
from fw.kinds.peft import without_adapters

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

LLAMA = transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
BIASED = transformers.Qwen2Config(**SIZES, num_key_value_heads=2)
GPT2 = transformers.GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=32, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0)
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "as published": (LLAMA, {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "outputs": (BIASED, {"target_modules": ["q_proj", "v_proj", "o_proj"], "feedforward_modules": []}),
    "inputs": (BIASED, {"target_modules": ["q_proj", "up_proj"], "feedforward_modules": ["q_proj", "up_proj"]}),
    "gpt2": (GPT2, {"target_modules": ["c_attn", "mlp.c_proj"], "feedforward_modules": ["mlp.c_proj"], "fan_in_fan_out": True}),
}


def made_by_peft(directory: Path, case: str) -> Any:
    config, options = CASES[case]
    model = peft.get_peft_model(base_in(directory, config), peft.IA3Config(task_type="CAUSAL_LM", **options))
    disturbed(model, 0.2).save_pretrained(directory / "adapter")
    return model


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_of_peft_gives_the_same_logits_and_gradients(tmp_path: Path, case: str) -> None:
    theirs = made_by_peft(tmp_path, case)
    ours = fw.load_model(tmp_path / "base", adapter=tmp_path / "adapter")
    expected, found, plain = theirs(IDS).logits, ours(IDS), fw.load_model(tmp_path / "base")(IDS)
    assert (found - expected).abs().max() < 1e-5
    assert (found - plain).abs().max() > 1e-3
    with without_adapters():
        assert torch.equal(ours(IDS), plain)
    same_gradients(theirs, ours, expected, found)


@pytest.mark.parametrize("case", CASES)
def test_peft_loads_what_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    config, options = CASES[case]
    base = base_in(tmp_path, config)
    given = {"name": "ia3", "targets": options["target_modules"], "feedforward": options["feedforward_modules"]}
    assert run(tmp_path, monkeypatch, given) == 0
    with torch.no_grad():
        untrained = base(IDS).logits
        theirs = peft.PeftModel.from_pretrained(base, checkpoint(tmp_path)).eval()
        ours = fw.load_model(checkpoint(tmp_path))
        expected, found = theirs(IDS).logits, ours(IDS)
    assert (found - expected).abs().max() < 1e-5
    assert (found - untrained).abs().max() > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_merged_equals_unmerged(tmp_path: Path, case: str) -> None:
    theirs = made_by_peft(tmp_path, case)
    assert main(["checkpoint", "merge", str(tmp_path / "base"), str(tmp_path / "adapter"), "--to", str(tmp_path / "merged")]) == 0
    with torch.no_grad():
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()(IDS).logits
        assert (merged - theirs(IDS).logits).abs().max() < 1e-5
        assert (merged - fw.load_model(tmp_path / "merged")(IDS)).abs().max() < 1e-5


def test_weight_decay_leaves_scales_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base_in(tmp_path, LLAMA)
    found = {}
    for decay in (0.0, 0.9):
        assert run(tmp_path, monkeypatch, {"name": "ia3"}, f"optimizer.weight_decay={decay}", f"train.run_dir=run-{decay}") == 0
        found[decay] = load_file(tmp_path / f"run-{decay}" / "checkpoints" / "latest" / "adapter_model.safetensors")
    assert all(torch.equal(found[0.0][name], found[0.9][name]) for name in found[0.0]) and found[0.0]


@pytest.mark.parametrize("function", ["relu", "gelu", "silu", "tanh"])
def test_a_bottleneck_is_what_its_formula_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    config, targets = (GPT2, ["c_proj"]) if function == "relu" else (BIASED, ["o_proj", "down_proj"])
    base = base_in(tmp_path, config)
    options = {"name": "adapter", "size": 4, "activation": function, "scale": 0.5, "targets": targets}
    assert run(tmp_path, monkeypatch, options) == 0
    tensors = load_file(checkpoint(tmp_path) / "adapter_model.safetensors")
    assert len(tensors) == 4 * 4  # two layers with two places each

    def behind(name: str) -> Any:
        of = {part: tensors[f"base_model.model.{name}.adapter_{part}"] for part in ("down.weight", "down.bias", "up.weight", "up.bias")}

        def hook(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
            inner = (
                getattr(F, function)(out @ of["down.weight"].t() + of["down.bias"])
                if function != "tanh"
                else torch.tanh(out @ of["down.weight"].t() + of["down.bias"])
            )
            return out + 0.5 * (inner @ of["up.weight"].t() + of["up.bias"])

        return hook

    with torch.no_grad():
        untrained = base(IDS).logits
        for name, module in base.named_modules():
            if name.endswith(tuple(targets)):
                module.register_forward_hook(behind(name))
        ours = fw.load_model(checkpoint(tmp_path))
        assert (ours(IDS) - base.eval()(IDS).logits).abs().max() < 1e-5
        assert (ours(IDS) - untrained).abs().max() > 1e-4
        with without_adapters():
            assert (ours(IDS) - untrained).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": "ia3", "targets": ["q_prj"]}, r"peft\.targets: 'q_prj' names no layer of this model; did you mean 'q_proj'"),
        ({"name": "ia3", "targets": ["embed_tokens"]}, "no linear layer"),
        ({"name": "adapter", "size": 0}, r"peft\.size: 0 is too small"),
        ({"name": "adapter", "activation": "swish"}, "activation"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, options: dict[str, Any], says: str
) -> None:
    base_in(tmp_path, LLAMA)
    assert run(tmp_path, monkeypatch, options) == 2
    assert re.search(says, capsys.readouterr().err)


def test_a_bottleneck_cannot_be_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    base_in(tmp_path, LLAMA)
    assert run(tmp_path, monkeypatch, {"name": "adapter", "size": 2}) == 0
    assert main(["checkpoint", "merge", str(tmp_path / "base"), str(checkpoint(tmp_path)), "--to", str(tmp_path / "merged")]) == 2
    assert "BOTTLENECK cannot be merged" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()
