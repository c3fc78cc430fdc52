"""Virtual tokens before a sequence, against peft."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fw
from adapting import IDS, base_in, checkpoint, run, small_configs
from fw.kinds.peft import without_adapters

peft = pytest.importorskip("peft")

CONFIGS = small_configs()
TOKENS = 3
PROMPT = {"name": "prompt", "tokens": TOKENS}


@pytest.mark.parametrize("name", CONFIGS)
def test_an_adapter_of_peft_gives_the_same_logits_and_gradient(tmp_path: Path, name: str) -> None:
    base = base_in(tmp_path, CONFIGS[name])
    theirs = peft.get_peft_model(base, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=TOKENS)).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    ours = fw.load_model(tmp_path / "base", adapter=tmp_path / "adapter")
    plain = fw.load_model(tmp_path / "base")(IDS)
    expected, found = theirs(IDS).logits[:, TOKENS:], ours(IDS)
    assert found.shape == plain.shape
    assert (found - expected).abs().max() < 1e-5
    assert (found - plain).abs().max() > 1e-3
    with without_adapters():
        assert torch.equal(ours(IDS), plain)
    for logits in (expected, found):
        logits.square().sum().backward()
    (wanted,) = [parameter.grad for parameter in theirs.parameters() if parameter.requires_grad]
    grad = ours.get_parameter("prompt_embeddings").grad
    assert grad is not None and (grad - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    assert [name for name, parameter in ours.named_parameters() if parameter.requires_grad] == ["prompt_embeddings"]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_peft_loads_what_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    base = base_in(tmp_path, CONFIGS[name])
    assert run(tmp_path, monkeypatch, PROMPT) == 0
    assert load_file(checkpoint(tmp_path) / "adapter_model.safetensors").keys() == {"prompt_embeddings"}
    with torch.no_grad():
        theirs = peft.PeftModel.from_pretrained(base, checkpoint(tmp_path)).eval()(IDS).logits[:, TOKENS:]
        assert (fw.load_model(checkpoint(tmp_path))(IDS) - theirs).abs().max() < 1e-5


def test_padded_rows_have_the_prompt_before_what_they_hold(tmp_path: Path) -> None:
    theirs = peft.get_peft_model(
        base_in(tmp_path, CONFIGS["llama"]), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=TOKENS)
    )
    theirs.save_pretrained(tmp_path / "adapter")
    ours = fw.load_model(tmp_path / "base", adapter=tmp_path / "adapter")
    segments = torch.ones_like(IDS)
    segments[1, 7:] = 0
    with torch.no_grad():
        padded = ours(IDS, segments_BL=segments)
        assert (padded[1, :7] - ours(IDS[1:, :7])[0]).abs().max() < 1e-5
        assert (padded[0] - ours(IDS[:1])[0]).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["data.min_length=4", "train.packing=true"], "virtual tokens stand before a row"),
        (["sharding={name: fsdp, tensor: 2}", "launch.devices=2"], "virtual tokens stand before whole sequences"),
        (["sharding={name: fsdp, context: 2}", "launch.devices=2"], r"virtual tokens \(peft=prompt, peft=prefix\)"),
        (["peft.tokens=0"], r"peft\.tokens: 0 is too small"),
        (["model={name: hf, path: base}"], "takes no virtual tokens"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], overrides: list[str], says: str
) -> None:
    base_in(tmp_path, CONFIGS["llama"])
    assert run(tmp_path, monkeypatch, PROMPT, *overrides) == 2
    assert re.search(says, capsys.readouterr().err)
