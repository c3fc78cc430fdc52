"""LoRA adapters as peft writes and reads them: ways to begin, tied heads, names. Against peft, unmerged and merged."""

from __future__ import annotations

import copy
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

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

LLAMA = transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
TIED = {
    "llama": transformers.LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "gpt2": transformers.GPT2Config(
        vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=32, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0
    ),
}
LAYERS: dict[str, dict[str, Any]] = {
    "llama": {"target_modules": ["q_proj"]},
    "gpt2": {"target_modules": ["c_attn"], "fan_in_fan_out": True},
}
EMBEDDING = {"llama": "model.embed_tokens", "gpt2": "transformer.wte"}


def made_by_peft(directory: Path, config: Any, **options: Any) -> torch.Tensor:
    """A base and an adapter of it in files; the logits of peft's model that wrote them."""
    base = base_in(directory, config)
    model = disturbed(peft.get_peft_model(base, peft.LoraConfig(**{"r": 4, "lora_alpha": 16, "task_type": "CAUSAL_LM", **options})), 0.1)
    model.save_pretrained(directory / "adapter")
    with torch.no_grad():
        return model(IDS).logits


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found = model(IDS)
    return found if isinstance(found, torch.Tensor) else found.logits


def plain(directory: Path) -> torch.Tensor:
    return logits(fw.load_model(directory / "base"))


def merged(directory: Path) -> int:
    return main(["checkpoint", "merge", str(directory / "base"), str(directory / "adapter"), "--to", str(directory / "merged")])


def both_read(directory: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the merged model, in fw and in transformers."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory / "merged").eval()
    return logits(fw.load_model(directory / "merged")), logits(theirs)


def with_config(directory: Path, **fields: Any) -> None:
    path = directory / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize("begun", ["pissa", "pissa_niter_2", "olora"])
def test_an_adapter_that_alters_its_base_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], begun: str) -> None:
    """peft's own logits are not those of the files' base with A and B beside it."""
    expected = made_by_peft(tmp_path, LLAMA, target_modules=["q_proj", "up_proj"], init_lora_weights=begun)
    with pytest.raises(UserError, match=f"init_lora_weights='{begun}' has peft alter .*path_initial_model_for_weight_conversion"):
        fw.load_model(tmp_path / "base", adapter=tmp_path / "adapter")
    assert merged(tmp_path) == 2 and begun in capsys.readouterr().err
    with_config(tmp_path, init_lora_weights=True)
    assert (logits(fw.load_model(tmp_path / "base", adapter=tmp_path / "adapter")) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("begun", ["corda", "loftq"])
def test_so_are_those_that_peft_makes_on_a_gpu_or_of_data(tmp_path: Path, begun: str) -> None:
    made_by_peft(tmp_path, LLAMA, target_modules=["q_proj"])
    with_config(tmp_path, init_lora_weights=begun)
    with pytest.raises(UserError, match=f"init_lora_weights='{begun}'"):
        fw.load_model(tmp_path / "base", adapter=tmp_path / "adapter")
    assert merged(tmp_path) == 2


def test_training_does_not_begin_from_an_adapter_that_alters_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made_by_peft(tmp_path, LLAMA, target_modules=["q_proj"], init_lora_weights="pissa")
    section = {"name": "lora", "rank": 4, "alpha": 16, "targets": ["q_proj"], "adapter": str(tmp_path / "adapter")}
    assert run(tmp_path, monkeypatch, section) == 2 and "init_lora_weights='pissa'" in capsys.readouterr().err
    with_config(tmp_path, init_lora_weights=True)
    assert run(tmp_path, monkeypatch, section) == 0


@pytest.mark.parametrize("begun", [True, False, "gaussian", "orthogonal", "eva", "mica", "lora_ga"])
def test_ways_to_begin_that_leave_the_base_as_it_is(tmp_path: Path, begun: bool | str) -> None:
    """As peft reads the adapter again, which is when it would alter the base."""
    made_by_peft(tmp_path, LLAMA, target_modules=["q_proj", "up_proj"])
    with_config(tmp_path, init_lora_weights=begun)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    expected = logits(peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval())
    assert (logits(fw.load_model(tmp_path / "base", adapter=tmp_path / "adapter")) - expected).abs().max() < 1e-5
    assert (expected - plain(tmp_path)).abs().max() > 1e-3


def test_an_adapter_that_peft_has_converted(tmp_path: Path) -> None:
    """The way out that the refusal names."""
    base = base_in(tmp_path, LLAMA)
    options = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj"], init_lora_weights="pissa", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, options)
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "initial")
    model.peft_config["default"].init_lora_weights = "pissa"
    expected = logits(disturbed(model, 0.1))
    model.save_pretrained(tmp_path / "adapter", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    assert (logits(fw.load_model(tmp_path / "base", adapter=tmp_path / "adapter")) - expected).abs().max() < 1e-5
    assert merged(tmp_path) == 0
    for found in both_read(tmp_path):
        assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize("kind", TIED)
def test_a_tied_embedding_that_trains_whole(tmp_path: Path, kind: str) -> None:
    """With peft's flag it is one tensor, which both sides use; merging keeps it so."""
    whole: dict[str, Any] = {"modules_to_save": [EMBEDDING[kind], "lm_head"], "ensure_weight_tying": True}
    expected = made_by_peft(tmp_path, TIED[kind], **LAYERS[kind], **copy.deepcopy(whole))
    assert "base_model.model.lm_head.weight" in load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    with_config(tmp_path, **whole)  # peft leaves the head's name out where the embedding's says it
    assert (logits(fw.load_model(tmp_path / "base", adapter=tmp_path / "adapter")) - expected).abs().max() < 1e-5
    assert (expected - plain(tmp_path)).abs().max() > 1e-3
    assert merged(tmp_path) == 0
    for found in both_read(tmp_path):
        assert (found - expected).abs().max() < 1e-5
    assert "lm_head.weight" not in load_file(tmp_path / "merged" / "model.safetensors")


def is_the_same_in_peft(tmp_path: Path, base: Any) -> None:
    """What was trained here changes what comes out, and gives peft's logits beside its base and merged with it."""
    untrained = logits(base.eval())
    expected = logits(peft.PeftModel.from_pretrained(base, checkpoint(tmp_path)).eval())
    assert (logits(fw.load_model(checkpoint(tmp_path))) - expected).abs().max() < 1e-5
    assert (expected - untrained).abs().max() > 1e-3
    (tmp_path / "adapter").symlink_to(checkpoint(tmp_path))
    assert merged(tmp_path) == 0
    for found in both_read(tmp_path):
        assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
@pytest.mark.parametrize("kind", TIED)
def test_what_trains_a_tied_embedding_whole_here_is_the_same_in_peft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    base = base_in(tmp_path, TIED[kind])
    name = EMBEDDING[kind].rpartition(".")[2] if name == "embed_tokens" else name
    assert run(tmp_path, monkeypatch, {"name": "lora", "targets": LAYERS[kind]["target_modules"], "whole": [name]}) == 0
    config = json.loads((checkpoint(tmp_path) / "adapter_config.json").read_text())
    assert config["ensure_weight_tying"] is True and "lm_head" in config["modules_to_save"]
    is_the_same_in_peft(tmp_path, base)
    again = {"name": "lora", "targets": LAYERS[kind]["target_modules"], "whole": [name], "adapter": str(tmp_path / "adapter")}
    assert run(tmp_path, monkeypatch, again, "train.run_dir=again") == 0


def test_training_both_does_not_begin_from_an_adapter_that_has_trained_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made_by_peft(tmp_path, TIED["llama"], target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    section = {"name": "lora", "rank": 4, "targets": ["q_proj"], "whole": ["embed_tokens"], "adapter": str(tmp_path / "adapter")}
    assert run(tmp_path, monkeypatch, section) == 2
    assert "was trained with ensure_weight_tying=False, the config means True" in capsys.readouterr().err


APART: dict[str, tuple[str, dict[str, Any], bool]] = {
    "embedding whole": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, False),
    "head whole": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, False),
    "both whole": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}, False),
    "gpt2's whole, a flag that peft ignores": ("gpt2", {**LAYERS["gpt2"], "modules_to_save": ["wte"], "ensure_weight_tying": True}, False),
    "embedding": ("llama", {"target_modules": ["q_proj", "embed_tokens"]}, True),
    "gpt2's embedding": ("gpt2", {"target_modules": ["c_attn", "wte"], "fan_in_fan_out": True}, True),
    "head": ("llama", {"target_modules": ["q_proj", "lm_head"]}, False),
    "head of gpt2": ("gpt2", {"target_modules": ["c_attn", "lm_head"], "fan_in_fan_out": True}, False),
    "both": ("llama", {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}, False),
    "both, tied": ("llama", {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}, False),
}
"""What is changed of a tied pair, and whether fw can read it as it is: one tensor cannot be two."""


@pytest.mark.parametrize("case", APART)
def test_a_tied_pair_of_which_one_is_changed(tmp_path: Path, case: str) -> None:
    """Read as peft does or refused; merged it gives peft's unmerged logits, which peft's own merging does not where the change is of low
    rank."""
    kind, options, readable = APART[case]
    expected = made_by_peft(tmp_path, TIED[kind], **options)
    assert (expected - plain(tmp_path)).abs().max() > 1e-3
    if readable:
        assert (logits(fw.load_model(tmp_path / "base", adapter=tmp_path / "adapter")) - expected).abs().max() < 1e-5
    else:
        with pytest.raises(UserError, match="fw checkpoint merge"):
            fw.load_model(tmp_path / "base", adapter=tmp_path / "adapter")
    assert merged(tmp_path) == 0
    for found in both_read(tmp_path):
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max().clamp(min=1)
    is_tied = case == "both, tied"
    assert ("lm_head.weight" in load_file(tmp_path / "merged" / "model.safetensors")) is not is_tied


@pytest.mark.parametrize("kind", TIED)
def test_what_changes_a_tied_embedding_here_is_the_same_in_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    base = base_in(tmp_path, TIED[kind])
    assert run(tmp_path, monkeypatch, {"name": "lora", "targets": [EMBEDDING[kind].rpartition(".")[2]]}) == 0
    is_the_same_in_peft(tmp_path, base)


READ: dict[str, dict[str, Any]] = {
    "an exclusion of nothing": {"target_modules": ["q_proj"], "exclude_modules": ["vision_tower"]},
    "a rank of nothing": {"target_modules": ["q_proj"], "rank_pattern": {"c_attn": 2}, "alpha_pattern": {"c_attn": 2}},
    "a target of nothing": {"target_modules": ["q_proj", "query_key_value"]},
    "a target that trains whole": {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["lm_head"]},
    "biases that there are not": {"target_modules": ["q_proj"], "bias": "all"},
    "whatever ends so": {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
}


@pytest.mark.parametrize("case", READ)
def test_what_peft_lets_pass_is_read(tmp_path: Path, case: str) -> None:
    expected = made_by_peft(tmp_path, LLAMA, **READ[case])
    assert (logits(fw.load_model(tmp_path / "base", adapter=tmp_path / "adapter")) - expected).abs().max() < 1e-5
    assert (expected - plain(tmp_path)).abs().max() > 1e-3


@pytest.mark.parametrize(
    "options, message",
    [
        ({"targets": ["q_proj"], "exclude": ["vision_tower"]}, "peft.exclude: 'vision_tower' names none"),
        ({"targets": ["q_proj"], "ranks": {"c_attn": 2}}, "peft.ranks: 'c_attn' names none"),
        ({"targets": ["q_proj"], "alphas": {"c_attn": 2.0}}, "peft.alphas: 'c_attn' names none"),
        ({"targets": ["q_proj", "c_attn"]}, "peft.targets: 'c_attn' names no layer"),
        ({"targets": ["q_proj"], "whole": ["wte"]}, "peft.whole: 'wte' is no module"),
        ({"targets": ["q_proj", "lm_head"], "whole": ["lm_head"]}, "peft.whole: lm_head trains whole, and peft.targets changes it"),
        ({"targets": ["q_proj"], "bias": "all"}, "peft.bias: all, but no such layer"),
    ],
)
def test_a_config_that_names_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: dict[str, Any], message: str
) -> None:
    base_in(tmp_path, LLAMA)
    assert run(tmp_path, monkeypatch, {"name": "lora", **options}) == 2
    assert message in capsys.readouterr().err


WHOLE: dict[str, tuple[list[str], list[str], list[str]]] = {
    "one of several layers": (["up_proj", "q_proj"], ["layers.0.mlp.up_proj"], ["model.layers.0.mlp.up_proj"]),
    "an end of other names": (["q_proj"], ["norm"], ["model.norm"]),
    "all of a name": (["q_proj"], ["input_layernorm"], ["input_layernorm"]),
}


@pytest.mark.parametrize("case", WHOLE)
def test_what_trains_whole_is_written_so_that_peft_means_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    targets, whole, written = WHOLE[case]
    base = base_in(tmp_path, LLAMA)
    exclude = [name for name in whole if name.rpartition(".")[2] in targets]
    assert run(tmp_path, monkeypatch, {"name": "lora", "targets": targets, "exclude": exclude, "whole": whole}) == 0
    assert json.loads((checkpoint(tmp_path) / "adapter_config.json").read_text())["modules_to_save"] == written
    untrained = logits(base.eval())
    theirs = peft.PeftModel.from_pretrained(base, checkpoint(tmp_path)).eval()
    assert (logits(fw.load_model(checkpoint(tmp_path))) - logits(theirs)).abs().max() < 1e-5
    assert (logits(theirs) - untrained).abs().max() > 1e-3
    in_peft = peft.get_peft_model_state_dict(theirs)
    assert in_peft.keys() == load_file(checkpoint(tmp_path) / "adapter_model.safetensors").keys()
