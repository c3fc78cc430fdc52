"""Keys and values of virtual tokens in every block, against peft."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fw
import tokens
from adapting import IDS, base_in, checkpoint, run, small_configs
from fw.cli import main
from fw.kinds.peft import without_adapters

peft = pytest.importorskip("peft")

CONFIGS = small_configs()
TOKENS = 3
PREFIX = {"name": "prefix", "tokens": TOKENS}


def _of_peft(tmp_path: Path, name: str, **options: object) -> torch.nn.Module:
    """Its adapter, in ``adapter``, with values that show."""
    torch.manual_seed(1)
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=TOKENS, **options)
    theirs = peft.get_peft_model(base_in(tmp_path, CONFIGS[name]), config).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    return theirs


@pytest.mark.parametrize("name", CONFIGS)
def test_an_adapter_of_peft_gives_the_same_logits_and_gradient(tmp_path: Path, name: str) -> None:
    theirs = _of_peft(tmp_path, name)
    ours = fw.load_model(tmp_path / "base", adapter=tmp_path / "adapter")
    plain = fw.load_model(tmp_path / "base")(IDS)
    expected, found = theirs(IDS).logits, ours(IDS)
    assert found.shape == plain.shape and (found - expected).abs().max() < 1e-5
    assert (found - plain).abs().max() > 1e-3
    with without_adapters():
        assert torch.equal(ours(IDS), plain)
    for logits in (expected, found):
        logits.square().sum().backward()
    (wanted,) = [parameter.grad for parameter in theirs.parameters() if parameter.requires_grad]
    grad = ours.get_parameter("prefix_embeddings").grad
    assert grad is not None and (grad - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    assert [name for name, parameter in ours.named_parameters() if parameter.requires_grad] == ["prefix_embeddings"]


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_padded_rows_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Routers see the row's own tokens."""
    base_in(tmp_path, CONFIGS[name])
    assert run(tmp_path, monkeypatch, PREFIX, "data.min_length=4") == 0


def test_what_peft_has_projected_is_read(tmp_path: Path) -> None:
    theirs = _of_peft(tmp_path, "llama", prefix_projection=True, encoder_hidden_size=24)
    with torch.no_grad():
        assert (fw.load_model(tmp_path / "base", adapter=tmp_path / "adapter")(IDS) - theirs(IDS).logits).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("attention", ["sdpa", "eager", "chunked"])
def test_peft_loads_what_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, attention: str) -> None:
    base = base_in(tmp_path, CONFIGS[name])
    assert run(tmp_path, monkeypatch, PREFIX, f"attention={attention}", "activation=full") == 0
    assert load_file(checkpoint(tmp_path) / "adapter_model.safetensors").keys() == {"prompt_embeddings"}
    with torch.no_grad():
        theirs = peft.PeftModel.from_pretrained(base, checkpoint(tmp_path)).eval()(IDS).logits
        assert (fw.load_model(checkpoint(tmp_path))(IDS) - theirs).abs().max() < 1e-5


def test_padded_rows_see_the_prefix_as_full_ones_do(tmp_path: Path) -> None:
    _of_peft(tmp_path, "llama")
    ours = fw.load_model(tmp_path / "base", adapter=tmp_path / "adapter")
    segments = torch.ones_like(IDS)
    segments[1, 7:] = 0
    with torch.no_grad():
        padded = ours(IDS, segments_BL=segments)
        assert (padded[1, :7] - ours(IDS[1:, :7])[0]).abs().max() < 1e-5
        assert (padded[0] - ours(IDS[:1])[0]).abs().max() < 1e-5


def test_positions_of_a_table_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    base_in(tmp_path, CONFIGS["gpt2"])
    assert run(tmp_path, monkeypatch, PREFIX, "train.sequence_length=30") == 2
    assert "3 virtual tokens and rows of 30 need 33 positions, and this model has 32" in capsys.readouterr().err
    assert run(tmp_path, monkeypatch, PREFIX, "train.sequence_length=29") == 0


@pytest.mark.parametrize("name", ["prompt", "prefix"])
@pytest.mark.parametrize(
    "words", [("generate", "{}", "w5 w9"), ("eval", "{}", "--text", "text.txt"), ("serve", "{}", "--port", "0")], ids=lambda words: words[0]
)
def test_generation_refuses_virtual_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, words: tuple[str, ...]
) -> None:
    """Trained here and peft's alike, by the adapter's directory or beside its base; peft generates with what was trained."""
    base = base_in(tmp_path, CONFIGS["llama"])
    assert run(tmp_path, monkeypatch, {"name": name, "tokens": TOKENS}) == 0
    theirs = peft.PeftModel.from_pretrained(base, checkpoint(tmp_path)).eval()
    assert theirs.generate(input_ids=IDS, max_new_tokens=3, do_sample=False).shape[1] == IDS.shape[1] + 3
    tokens.save(tmp_path / "base", 131)
    (tmp_path / "text.txt").write_text("w1 w2 w3")
    beside = f"{'mine=' if words[0] == 'serve' else ''}{checkpoint(tmp_path)}"
    for model in ([str(checkpoint(tmp_path))], [str(tmp_path / "base"), "--adapter", beside]):
        capsys.readouterr()
        given = [part for word in words for part in (model[:1] if word == "{}" else [word])]
        assert main([*given, *model[1:]]) == 2
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert said.startswith(f"fw: error: {checkpoint(tmp_path)} is an adapter of virtual tokens (peft=prompt, peft=prefix), which"), said
        assert said.endswith("which generation does not put before prompts; peft's own code generates with it")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["data.min_length=4", "train.packing=true"], "virtual tokens stand before a row"),
        (["sharding={name: fsdp, tensor: 2}", "launch.devices=2"], "virtual tokens stand before whole sequences"),
        (["sharding={name: fsdp, context: 2}", "launch.devices=2"], r"virtual tokens \(peft=prompt, peft=prefix\)"),
        (["peft.tokens=0"], r"peft\.tokens: 0 is too small"),
        (["model={name: hf, path: base}"], "takes no virtual tokens"),
        (["data.min_length=4", "objective=dpo"], "does not work with data|which both answers of a pair share"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], overrides: list[str], says: str
) -> None:
    base_in(tmp_path, CONFIGS["llama"])
    assert run(tmp_path, monkeypatch, PREFIX, *overrides) == 2
    assert re.search(says, capsys.readouterr().err)
