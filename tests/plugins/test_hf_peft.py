"""Methods of the peft library in fw's models, against peft in transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fw
from adapting import IDS, SIZES, base_in, checkpoint, computes_as_peft, disturbed, peft_computes_as_trained, run, same_gradients
from fw.kinds import make
from fw.kinds.peft import without_adapters
from fw.kinds.quantization import QuantizationPlugin

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

BASES = {
    "llama": transformers.LlamaConfig(**SIZES, num_key_value_heads=2),
    "qwen2": transformers.Qwen2Config(**SIZES, num_key_value_heads=2),
}
TARGETS = ["q_proj", "o_proj", "up_proj"]
METHODS: dict[str, dict[str, Any]] = {
    "LOHA": {"r": 4, "alpha": 8},
    "LOKR": {"r": 4, "alpha": 8},
    "HRA": {"r": 4},
    "MISS": {"r": 4},
    "C3A": {"block_size": 16},
    "ROAD": {"group_size": 16},
    "GRALORA": {"r": 4},
    "OFT": {"oft_block_size": 8},
    "FOURIERFT": {"n_frequency": 50, "scaling": 30.0},
    "WAVEFT": {"n_frequency": 50},
    "HIRA": {"r": 4},
    "DEFT": {"r": 4, "para": True},
    "PEANUT": {"r": 4, "depth": 1},
    "BEFT": {},
    "VERA": {"r": 4},
    "PVERA": {"r": 4},
    "RANDLORA": {"r": 4},
    "VBLORA": {"r": 4, "num_vectors": 12, "vector_length": 8},
    "UNILORA": {"r": 4, "theta_d_length": 64},
    "DELORA": {"r": 4},
    "GLORA": {"r": 4},
    "SHIRA": {"r": 4},
    "BOFT": {"boft_block_size": 8},
    "PSOFT": {"r": 4},
    "SUPERTUNING": {"sparsity": 0.9, "r": 2, "lora_alpha": 4},
    "IA3": {"feedforward_modules": ["up_proj"]},
    "LORA": {"r": 4, "init_lora_weights": "orthogonal"},
}


def section(method: str, **options: Any) -> dict[str, Any]:
    return {"name": "hf_peft", "type": method, "config": {"target_modules": TARGETS, **METHODS.get(method, {}), **options}}


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("LORA", "IA3")])
def test_an_adapter_of_peft_gives_the_same_logits_and_gradients(tmp_path: Path, method: str) -> None:
    base = base_in(tmp_path, BASES["qwen2" if method in ("LOHA", "HRA") else "llama"])
    options = peft.get_peft_config({"peft_type": method, "task_type": "CAUSAL_LM", "target_modules": TARGETS, **METHODS[method]})
    ours, plain = computes_as_peft(tmp_path, disturbed(peft.get_peft_model(base, options), 0.1))
    with without_adapters():
        assert torch.equal(ours(IDS), plain)


@pytest.mark.parametrize("method", METHODS)
def test_peft_loads_what_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    base = base_in(tmp_path, BASES["llama"])
    assert run(tmp_path, monkeypatch, section(method)) == 0
    peft_computes_as_trained(tmp_path, base)


@pytest.mark.parametrize(
    ("method", "options", "shared", "written"),
    [
        ("VERA", {}, ["vera_A", "vera_B"], True),
        ("VERA", {"save_projection": False}, ["vera_A", "vera_B"], False),
        ("RANDLORA", {"save_projection": False, "sparse": True}, ["randlora_A", "randlora_B"], False),
        ("VBLORA", {}, ["vblora_vector_bank"], True),
        ("UNILORA", {"save_indices": True}, ["unilora_theta_d"], True),
    ],
)
def test_what_layers_share_is_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, options: dict[str, Any], shared: list[str], written: bool
) -> None:
    """In memory and in files, which say by an option whether they hold what does not train; one without it makes it anew."""
    base = base_in(tmp_path, BASES["llama"])
    assert run(tmp_path, monkeypatch, section(method, **options)) == 0
    in_file = list(load_file(checkpoint(tmp_path) / "adapter_model.safetensors"))
    assert [name for name in in_file if not name.startswith("base_model.model.")] == [f"base_model.{name}" for name in shared if written]
    assert any(name.endswith("unilora_indices_A") for name in in_file) == (method == "UNILORA")
    ours = fw.load_model(checkpoint(tmp_path))
    assert [name for name, _ in (*ours.named_parameters(), *ours.named_buffers()) if name.startswith("peft.")] == [
        f"peft.{name}.default" for name in shared
    ]
    with torch.no_grad():
        theirs = peft.PeftModel.from_pretrained(base, checkpoint(tmp_path)).eval()
        assert (ours(IDS) - theirs(IDS).logits).abs().max() < 1e-5


@pytest.mark.parametrize("method", ["HRA", "VERA", "VBLORA", "UNILORA", "SHIRA"])
def test_generated_tokens_are_those_of_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    base = base_in(tmp_path, BASES["llama"])
    assert run(tmp_path, monkeypatch, section(method), "optimizer.lr=0.3") == 0
    found = fw.LLM(checkpoint(tmp_path), dtype="fp32").generate(IDS[:1].tolist(), max_tokens=8, temperature=0, ignore_eos=True)
    theirs = peft.PeftModel.from_pretrained(base, checkpoint(tmp_path)).eval()
    expected = theirs.generate(input_ids=IDS[:1], max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert list(found[0].token_ids) == expected[0, IDS.shape[1] :].tolist()


def test_values_at_the_beginning_are_those_of_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base_in(tmp_path, BASES["llama"])
    found = []
    for seed in (1, 1, 2):
        overrides = [f"train.seed={seed}", f"train.run_dir=run-{len(found)}", "optimizer.lr=0"]
        assert run(tmp_path, monkeypatch, section("LOHA"), *overrides) == 0
        found.append(load_file(tmp_path / f"run-{len(found)}" / "checkpoints" / "latest" / "adapter_model.safetensors"))
    name = next(name for name in found[0] if name.endswith("q_proj.hada_w1_a"))
    other = name.replace("layers.0", "layers.1")
    assert torch.equal(found[0][name], found[1][name])
    assert not torch.equal(found[0][name], found[2][name]) and not torch.equal(found[0][name], found[0][other])


LAYERS = ["k_proj", "q_proj", "o_proj", "v_proj", "up_proj", "gate_proj", "down_proj"]


def changed_by(model: Any) -> set[str]:
    """Layers that peft has changed, of a model of peft's."""
    return set(model.base_model.targeted_module_names)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {f"{block}.{layer}" for block in (0, 1) for layer in LAYERS}),
        ({"target_modules": "all-linear", "exclude_modules": ["v_proj"]}, {f"{b}.{x}" for b in (0, 1) for x in LAYERS if x != "v_proj"}),
        ({"target_modules": r".*layers\.1\.self_attn\.(q|v)_proj"}, {"1.q_proj", "1.v_proj"}),
        ({"target_modules": ["layers.0.mlp.up_proj", "o_proj"]}, {"0.up_proj", "0.o_proj", "1.o_proj"}),
        ({"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]}, {"1.q_proj", "1.up_proj"}),
        ({"layers_to_transform": 0, "layers_pattern": "layers"}, {f"0.{layer}" for layer in LAYERS}),
    ],
)
@pytest.mark.parametrize("method", ["LOHA", "LORA"])
def test_the_same_layers_are_changed_however_they_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, options: dict[str, Any], expected: set[str]
) -> None:
    base = base_in(tmp_path, BASES["llama"])
    assert run(tmp_path, monkeypatch, {"name": "hf_peft", "type": method, "config": {"r": 4, **options}}) == 0
    with torch.no_grad():
        untrained = base(IDS).logits
        theirs = peft.PeftModel.from_pretrained(base, checkpoint(tmp_path)).eval()
        found = fw.load_model(checkpoint(tmp_path))(IDS)
        assert (found - theirs(IDS).logits).abs().max() < 1e-5
    assert (found - untrained).abs().max() > 1e-4
    assert {f"{name.split('.')[2]}.{name.rpartition('.')[2]}" for name in changed_by(theirs)} == expected


@pytest.mark.parametrize("method", ["LOHA", "LORA"])
def test_peft_chooses_layers_of_its_adapters_by_the_same_rules(tmp_path: Path, method: str) -> None:
    """Numbers of blocks, a pattern for these, and ranks and alphas by names that only files have."""
    base = base_in(tmp_path, BASES["llama"])
    alpha = "lora_alpha" if method == "LORA" else "alpha"
    options = peft.get_peft_config(
        {
            "peft_type": method,
            "task_type": "CAUSAL_LM",
            "target_modules": TARGETS,
            "r": 4,
            alpha: 8,
            "layers_to_transform": [1],
            "layers_pattern": "layers",
            "rank_pattern": {"model.layers.1.self_attn.q_proj": 2},
            "alpha_pattern": {r"model\..*up_proj": 3},
        }
    )
    theirs = disturbed(peft.get_peft_model(base, options), 0.1)
    theirs.save_pretrained(tmp_path / "adapter")
    ours = fw.load_model(tmp_path / "base", adapter=tmp_path / "adapter")
    expected, found = theirs(IDS).logits, ours(IDS)
    assert (found - expected).abs().max() < 1e-5
    same_gradients(theirs, ours, expected, found)


@pytest.mark.parametrize("method", ["LOHA", "LORA"])
def test_ranks_and_alphas_of_single_layers_are_as_peft_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    base = base_in(tmp_path, BASES["llama"])
    patterns = {"rank_pattern": {"model.layers.0.self_attn.q_proj": 2, "up_proj": 6}, "alpha_pattern": {r"model\..*o_proj": 32}}
    assert (
        run(tmp_path, monkeypatch, section(method, **patterns, init_lora_weights=True) if method == "LORA" else section(method, **patterns))
        == 0
    )
    with torch.no_grad():
        theirs = peft.PeftModel.from_pretrained(base, checkpoint(tmp_path)).eval()
        assert (fw.load_model(checkpoint(tmp_path))(IDS) - theirs(IDS).logits).abs().max() < 1e-5
    layers = theirs.base_model.model.model.layers
    assert [layers[i].self_attn.q_proj.r["default"] for i in (0, 1)] == [2, 4]
    assert layers[1].mlp.up_proj.r["default"] == 6
    scale = {"LOHA": 32 / 4, "LORA": 32 / 4}[method]
    assert layers[0].self_attn.o_proj.scaling["default"] == scale


@pytest.mark.parametrize("init", [True, "gaussian", "orthogonal"])
def test_lengths_of_rows_begin_as_those_of_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, init: bool | str) -> None:
    base = base_in(tmp_path, BASES["llama"])
    assert run(tmp_path, monkeypatch, section("LORA", use_dora=True, init_lora_weights=init), "optimizer.lr=0") == 0
    written = load_file(checkpoint(tmp_path) / "adapter_model.safetensors")
    magnitudes = {name: tensor for name, tensor in written.items() if name.endswith(".lora_magnitude_vector")}
    assert len(magnitudes) == 6
    for name, magnitude in magnitudes.items():
        weight = base.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_magnitude_vector")).weight
        assert torch.allclose(magnitude, weight.detach().norm(dim=1), rtol=1e-5)
    with torch.no_grad():
        assert (fw.load_model(checkpoint(tmp_path))(IDS) - base(IDS).logits).abs().max() < 1e-5


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}, {"lora_bias": True, "use_rslora": True, "r": 2}])
def test_variants_of_lora_go_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    base = base_in(tmp_path, BASES["qwen2"])
    targets = ["q_proj", "v_proj"]  # which have biases, without which lora_bias is nothing
    assert run(tmp_path, monkeypatch, section("LORA", **options, init_lora_weights=True, target_modules=targets)) == 0
    with torch.no_grad():
        untrained = base(IDS).logits
        theirs = peft.PeftModel.from_pretrained(base, checkpoint(tmp_path), is_trainable=True).eval()
        found = fw.load_model(checkpoint(tmp_path))(IDS)
        assert (found - theirs(IDS).logits).abs().max() < 1e-5 and (found - untrained).abs().max() > 1e-4
    disturbed(theirs, 0.1).save_pretrained(tmp_path / "adapter")
    ours = fw.load_model(tmp_path / "base", adapter=tmp_path / "adapter")
    expected, found = theirs(IDS).logits, ours(IDS)
    assert (found - expected).abs().max() < 1e-5
    same_gradients(theirs, ours, expected, found)


def test_a_beginning_that_does_not_look_at_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of DEFT, which has one that does, beside: it changes what the base computes from the first step, as peft says of it."""
    base = base_in(tmp_path, BASES["llama"])
    assert run(tmp_path, monkeypatch, section("DEFT", para=False, init_weights=False), "optimizer.lr=0") == 0
    with torch.no_grad():
        untrained = base(IDS).logits
        theirs = peft.PeftModel.from_pretrained(base, checkpoint(tmp_path)).eval()(IDS).logits
        found = fw.load_model(checkpoint(tmp_path))(IDS)
    assert (found - theirs).abs().max() < 1e-5 and (found - untrained).abs().max() > 1e-5


def test_lengths_of_rows_are_refused_over_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base_in(tmp_path, BASES["llama"])
    assert run(tmp_path, monkeypatch, section("LORA", use_dora=True), "quantization=nf4") == 2
    assert "use_dora begins with norms of weights, of which" in capsys.readouterr().err


GPT2 = transformers.GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=32, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0)


@pytest.mark.parametrize(
    "method", ["LORA", "HIRA", "FOURIERFT", "DEFT", "GRALORA", "WAVEFT", "VERA", "PVERA", "RANDLORA", "VBLORA", "UNILORA"]
)
def test_weights_that_files_hold_transposed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    base = base_in(tmp_path, GPT2)
    assert run(tmp_path, monkeypatch, section(method, target_modules=["c_attn", "mlp.c_proj"])) == 0
    with torch.no_grad():
        untrained = base(IDS).logits
        theirs = peft.PeftModel.from_pretrained(base, checkpoint(tmp_path)).eval()(IDS).logits
        found = fw.load_model(checkpoint(tmp_path))(IDS)
    assert (found - theirs).abs().max() < 1e-5 and (found - untrained).abs().max() > 1e-4


@pytest.mark.parametrize("method", ["LOHA", "OFT"])
def test_methods_that_know_none_transposed_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    base_in(tmp_path, GPT2)
    assert run(tmp_path, monkeypatch, section(method, target_modules=["c_attn"])) == 2
    assert f"{method} changes no weights that files hold transposed, as they do transformer.h.0.attn.c_attn" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "options", "says"),
    [
        ("LOHAA", {}, "'LOHAA' is no method of peft that changes layers"),
        ("PREFIX_TUNING", {}, "no method of peft that changes layers"),
        ("LOHA", {"rang": 3}, "rang"),
        ("LILY", {"r": 4}, "LILY is not taken: what it computes of a token depends on all tokens of the batch, later ones among them"),
        ("TINYLORA", {"r": 4}, "TINYLORA is not taken: it factorizes the weights of all layers at once"),
        ("VBLORA", {"vector_length": 7}, "must be divisible by `vector_length` 7"),
        ("VBLORA", {"topk": 13}, "topk: 13 vectors are to be chosen of 12 (num_vectors)"),
        ("VERA", {"r": 0}, "peft cannot compute with these options (float division by zero); look for a zero"),
        ("VBLORA", {"save_only_topk_weights": True}, "save_only_topk_weights of VBLORA has no place here: such files can train no further"),
        ("PVERA", {"sample_at_inference": True}, "sample_at_inference of PVERA has no place here: one prompt would have many answers"),
        ("PVERA", {"generator_seed": 3}, "generator_seed of PVERA has no place here: a run that goes on would draw the same again"),
        ("BOFT", {"boft_n_butterfly_factor": 2}, "peft computes more factors than one by a kernel that it compiles for CUDA alone"),
        ("OFT", {"oft_block_size": 8, "coft": True}, "coft of OFT has no place here: it writes to its parameters in forward"),
        ("OFT", {"oft_block_size": 7}, "oft_block_size: 7 does not divide the 32 inputs of model.layers.0.self_attn.q_proj"),
        ("HRA", {"bias": "all"}, "bias has no place here"),
        ("LOHA", {"modules_to_save": ["lm_head"]}, "modules_to_save has no place here; use peft=lora"),
        ("LOHA", {"rank_pattern": {"q_prj": 2}}, "rank_pattern: 'q_prj' names none of the layers that are changed"),
        ("LOHA", {"layers_to_transform": [0, 2]}, "layers_to_transform: 2 is no block with layers that are changed"),
        ("PSOFT", {"r": 33}, "must be less than or equal to min(in_features, out_features)"),
        ("LORA", {"init_lora_weights": "pissa"}, "init_lora_weights: pissa looks at the base's weights or changes them"),
        ("LORA", {"init_lora_weights": "olora"}, "init_lora_weights: olora looks at the base's weights or changes them"),
        ("LORA", {"init_lora_weights": "eva"}, "init_lora_weights: eva looks at the base's weights or changes them"),
        ("LORA", {"init_lora_weights": False, "use_dora": True}, "whose lengths of rows use_dora does not see"),
        ("LORA", {"target_parameters": ["q_proj.weight"]}, "target_parameters of LORA needs more than the layers that it changes"),
        ("LORA", {"trainable_token_indices": [1]}, "trainable_token_indices of LORA needs more"),
        ("LORA", {"layer_replication": [[0, 1], [0, 2]]}, "layer_replication of LORA needs more"),
        ("LOHA", {"target_modules": ["q_prj"]}, "did you mean 'q_proj'"),
        ("LOHA", {"target_modules": ["embed_tokens"]}, "is no linear layer"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], method: str, options: dict[str, Any], says: str
) -> None:
    base_in(tmp_path, BASES["llama"])
    assert run(tmp_path, monkeypatch, section(method, **options)) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("quantization", ["nf4", "w8a16", "w4a16"])
@pytest.mark.parametrize("method", ["LOHA", "LOKR", "HRA", "MISS", "OFT", "HIRA", "DEFT", "PEANUT", "VERA", "GLORA", "SHIRA"])
def test_over_codes_it_computes_what_peft_does_over_what_they_stand_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, quantization: str
) -> None:
    """HRA turns weights, HIRA, DEFT, PEANUT, GLORA and SHIRA compute with them, the first two take the shape of their change from them."""
    base = base_in(tmp_path, BASES["llama"])
    sizes = {} if quantization == "nf4" else {"group_size": 16}
    assert run(tmp_path, monkeypatch, section(method), f"quantization={json.dumps({'name': quantization, **sizes})}") == 0
    ours = fw.load_model(checkpoint(tmp_path), quantization=make(QuantizationPlugin, quantization, **sizes))
    for name, layer in ours.named_modules():
        if hasattr(layer, "dense_weight"):
            base.get_submodule(f"model.{name}" if not name.startswith("lm_head") else name).weight.data = layer.dense_weight(torch.float32)
    with torch.no_grad():
        untrained = base(IDS).logits
        theirs = peft.PeftModel.from_pretrained(base, checkpoint(tmp_path)).eval()(IDS).logits
        found = ours(IDS)
    assert (found - theirs).abs().max() < 1e-4
    assert (found - untrained).abs().max() > 1e-4


def test_deepspeed_does_not_bring_what_is_inside_of_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base_in(tmp_path, BASES["llama"])
    assert run(tmp_path, monkeypatch, section("LOHA"), "sharding={name: zero, stage: 3}") == 2
    assert "sharding.stage: 3 brings parameters to the layers that DeepSpeed sees, and hf_peft computes with" in capsys.readouterr().err
