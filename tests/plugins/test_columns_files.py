"""Directories of AutoGPTQ and AutoAWQ, packed here as these formats are defined, against transformers' models of what codes stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import fw
import tokens
from fw.cli import main
from fw.config import Config, overridden
from fw.errors import UserError
from fw.planning.generation import plan_generation
from fw.recipe.inference import resolve_inference
from fw_plugins.quantization.grouped import ORDER
from live import assemblies

transformers = pytest.importorskip("transformers")

IDS = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(1))
SIZES = {"vocab_size": 40, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=False),
    "qwen2": transformers.Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16, tie_word_embeddings=False),
    "mixtral": transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1),
}


@dataclass
class Form:
    """A ``quantization_config``, and what it is about."""

    method: str = "gptq"
    bits: int = 4
    group: int = 32
    sym: bool = False
    desc_act: bool = False
    head: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        """As the packages write it."""
        shared = {"quant_method": self.method, "bits": self.bits, "group_size": self.group}
        if self.method == "awq":
            return {**shared, "version": "gemm", "zero_point": True, "modules_to_not_convert": ["mlp.down_proj"], **self.more}
        return {**shared, "sym": self.sym, "desc_act": self.desc_act, "lm_head": self.head, **self.more}


def words(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Neighbours of the last dimension in 32-bit words, at ``order``'s places from the low bits on."""
    many = 32 // bits
    found = np.zeros((*codes.shape[:-1], codes.shape[-1] // many), np.uint32)
    for place, column in enumerate(order or range(many)):
        found |= codes[..., column::many].astype(np.uint32) << np.uint32(place * bits)
    return found.view(np.int32)


def packed(form: Form, features_in: int, features_out: int, chance: np.random.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Random codes in the package's tensors, and the weight ``[O, I]`` that they stand for."""
    size = features_in if form.group == -1 else form.group
    groups, most = features_in // size, 2**form.bits - 1
    codes_IO = chance.integers(0, most + 1, (features_in, features_out))
    # A zero of 0 is stored as -1, which takes from its neighbour.
    zeros_GO = np.full((groups, features_out), (most + 1) // 2) if form.sym else chance.integers(0, most + 1, (groups, features_out))
    scales_GO = (chance.uniform(0.5, 1.5, (groups, features_out)) * 0.5 / most).astype(np.float16)
    of_I = np.arange(features_in) // size
    if form.desc_act:
        of_I = chance.permutation(of_I)
    dense_IO = (codes_IO - zeros_GO[of_I]).astype(np.float32) * scales_GO[of_I].astype(np.float32)
    found = {"scales": scales_GO}
    if form.method == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        found |= {"qweight": words(codes_IO, 4, order), "qzeros": words(zeros_GO, 4, order)}
    else:
        zeros = words(zeros_GO, form.bits)
        if form.more.get("checkpoint_format") != "gptq_v2":
            zeros = (zeros.view(np.uint32) - np.uint32(sum(1 << at for at in range(0, 32, form.bits)))).view(np.int32)
        found |= {"qweight": np.ascontiguousarray(words(codes_IO.T, form.bits).T), "qzeros": zeros, "g_idx": of_I.astype(np.int32)}
    return {key: torch.from_numpy(value) for key, value in found.items()}, torch.from_numpy(np.ascontiguousarray(dense_IO.T))


def is_coded(form: Form, name: str) -> bool:
    """Linear layers of blocks, without the routers; and the head, where it is said."""
    if form.method == "awq" and "mlp.down_proj" in name:
        return False
    return name.endswith(("proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")) or (form.head and name == "lm_head.weight")


def written(directory: Path, kind: str, form: Form) -> Any:
    """The directory, and transformers' plain model of what is in it, fp32."""
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind])
    for name, parameter in theirs.named_parameters():
        if name.endswith("bias"):  # begin as zeros
            torch.nn.init.normal_(parameter)
    theirs.save_pretrained(directory)
    chance = np.random.default_rng(0)
    tensors, plain = {}, load_file(directory / "model.safetensors")
    for name, weight in plain.items():
        if not is_coded(form, name):
            tensors[name] = weight
            continue
        parts, plain[name] = packed(form, weight.shape[1], weight.shape[0], chance)
        tensors |= {f"{name.removesuffix('weight')}{key}": value for key, value in parts.items()}
    save_file(plain, directory / "model.safetensors", {"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    change_config(directory, lambda config: config.update(quantization_config=form.config()))
    return theirs


def change_config(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Of the directory."""
    config = json.loads((directory / "config.json").read_text())
    change(config)
    (directory / "config.json").write_text(json.dumps(config))


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Of the directory."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found = model(IDS)
    return getattr(found, "logits", found).float()


def assert_same(found: torch.Tensor, expected: torch.Tensor, error: float = 1e-5) -> None:
    assert expected.std() > 1e-3 and (found - expected).abs().max() <= error * expected.abs().max()


FORMS = {
    "gptq": Form(),
    "sym": Form(sym=True),
    "of whole rows": Form(group=-1, sym=True, more={"checkpoint_format": "gptq"}),
    "act order": Form(desc_act=True, group=16),
    "act order, sym, 8 bits": Form(desc_act=True, sym=True, bits=8),
    "8 bits": Form(bits=8, more={"checkpoint_format": "gptq_v2"}),
    "v2": Form(more={"checkpoint_format": "gptq_v2"}),
    "head": Form(head=True),
    "awq": Form("awq"),
    "awq of whole rows": Form("awq", group=-1),
}


@pytest.mark.parametrize("kind, form", [("llama", each) for each in FORMS] + [("qwen2", "gptq"), ("qwen2", "awq"), ("qwen3", "act order")])
def test_logits_are_those_of_what_codes_stand_for(tmp_path: Path, kind: str, form: str) -> None:
    said = FORMS[form]
    theirs = written(tmp_path, kind, said)
    ours = fw.load_model(tmp_path, dtype=torch.float32)
    assert len(ours.quantized) == (12 if said.method == "awq" else 14 + said.head)
    assert_same(logits(ours), logits(theirs))
    for name in ours.quantized:
        (of,) = ours.hf_tensors(name)
        dense = ours.get_submodule(name.removesuffix(".weight")).dense_weight(torch.float32)
        assert torch.equal(dense, theirs.get_parameter(of.name)), name
    assert any(name.endswith(ORDER) for name, _ in ours.named_parameters()) == said.desc_act
    plain = fw.load_model(tmp_path, dtype=torch.float32, quantization="none")
    assert not plain.quantized
    assert_same(logits(plain), logits(theirs), 2e-3)  # of fp16, which is what weights were


@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_experts_that_files_hold_codes_of_are_what_these_stand_for(tmp_path: Path, form: str) -> None:
    theirs = written(tmp_path, "mixtral", FORMS[form])
    ours = fw.load_model(tmp_path, dtype=torch.float32)
    assert sorted({name.split(".")[-2] for name in ours.quantized}) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert_same(logits(ours), logits(theirs), 2e-3)


def test_awq_is_what_compressed_tensors_makes_of_it(tmp_path: Path) -> None:
    converters = pytest.importorskip("compressed_tensors.entrypoints.convert.converters.autoawq")
    form = Form("awq")
    written(tmp_path / "awq", "llama", form)
    ours = fw.load_model(tmp_path / "awq", dtype=torch.float16)
    again = load_file(fw.save_model(ours, tmp_path / "again") / "model.safetensors")
    converter = converters.AutoAWQConverter.from_autoawq_config(form.config())
    expected = converter.process(load_file(tmp_path / "awq/model.safetensors"))
    assert again.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(again[name], value.to(again[name].dtype)), name


@pytest.mark.parametrize("form", ["gptq", "sym", "8 bits", "head"])
def test_saved_it_is_of_compressed_tensors_and_the_same(tmp_path: Path, form: str) -> None:
    written(tmp_path / "there", "llama", FORMS[form])
    ours = fw.load_model(tmp_path / "there", dtype=torch.float32)
    made = fw.save_model(ours, tmp_path / "again")
    config = json.loads((made / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors" and config["ignore"] == ([] if FORMS[form].head else ["lm_head"])
    assert torch.equal(logits(fw.load_model(made, dtype=torch.float32)), logits(ours))


def test_an_order_of_columns_has_no_place_in_what_is_saved(tmp_path: Path) -> None:
    written(tmp_path / "there", "llama", FORMS["act order"])
    with pytest.raises(UserError, match=r"q_proj\.weight: its columns are in groups by .*\(desc_act\).*quantization='none' and save"):
        fw.save_model(fw.load_model(tmp_path / "there"), tmp_path / "again")
    assert not (tmp_path / "again").exists()
    weights = fw.save_model(fw.load_model(tmp_path / "there", dtype=torch.float32, quantization="none"), tmp_path / "weights")
    assert_same(logits(fw.load_model(weights)), logits(fw.load_model(tmp_path / "there", dtype=torch.float32)), 2e-3)


@pytest.mark.parametrize("form", ["sym", "act order", "awq"])
def test_answers_are_those_of_the_weights(tmp_path: Path, form: str) -> None:
    theirs = written(tmp_path, "llama", FORMS[form])
    tokens.save(tmp_path, 40)
    llm = fw.LLM(tmp_path, dtype="fp32", device="cpu")
    for prompt in ([5, 6, 7], [9, 11]):
        (found,) = llm.generate([prompt], max_tokens=8, temperature=0, ignore_eos=True)
        out = theirs.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert found.token_ids == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("form", ["gptq", "act order"])
def test_adapters_train_beside_them(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    written(workspace / "there", "llama", FORMS[form])
    codes = load_file(workspace / "there/model.safetensors")
    quantization = f"quantization={{name: w4a16, group_size: {FORMS[form].group}, symmetric: false}}"
    options = ["model={name: auto, path: there}", "peft={name: lora, targets: [all-linear]}", "precision=bf16", quantization]
    options += ["data={name: synthetic, vocab_size: 40, samples: 64}", "train.max_steps=2", "train.run_dir=run"]
    runs = assemblies(monkeypatch)
    assert main(["train", "tiny.yaml", *options]) == 0
    live = runs[0].model
    anew = "holds other codes than quantization says" in capsys.readouterr().err
    assert anew == FORMS[form].desc_act and len(live.quantized) == 14
    for name in () if anew else live.quantized:
        (of,) = live.hf_tensors(name)
        layer, stem = live.get_submodule(name.removesuffix(".weight")), of.name.removesuffix("weight")
        assert torch.equal(layer.weight.view(torch.int32), codes[f"{stem}qweight"].t()), name
        assert torch.equal(layer.weight_scale.view(torch.float32), codes[f"{stem}scales"].t().float()), name
        assert layer.lora_B.norm() > 0, "it did train"


@pytest.mark.parametrize("form, group_bytes, column_bytes", [("sym", 4, 0), ("gptq", 5, 0), ("act order", 5, 4), ("awq", 5, 0)])
def test_a_plan_knows_what_is_kept(tmp_path: Path, form: str, group_bytes: int, column_bytes: int) -> None:
    """By hand: codes, and what is kept of each group and column."""
    written(tmp_path, "llama", FORMS[form])
    tokens.save(tmp_path, 40)
    chosen = resolve_inference(overridden(Config("test", {}, {}), ["inference.device=cpu", "inference.dtype=fp32"]))
    planned = plan_generation(tmp_path, chosen).largest.at_peak["parameters"]
    expected = 4 * (2 * 40 * 64 + 5 * 64)  # embedding, head and norms
    for out, into in 2 * [(64, 64), (32, 64), (32, 64), (64, 64), (96, 64), (96, 64)]:
        expected += out * into // 2 + out * (into // FORMS[form].group) * group_bytes + into * column_bytes
    down = 4 * 64 * 96 if form == "awq" else 64 * 96 // 2 + 64 * (96 // FORMS[form].group) * group_bytes + 96 * column_bytes
    assert planned == expected + 2 * down


@pytest.mark.parametrize(
    ("form", "more", "sentence"),
    [
        (
            "gptq",
            {"bits": 3},
            r"config\.json: quantization_config: bits: 3 is not read, only 4 and 8; take a directory of the plain weights",
        ),
        ("gptq", {"bits": 2}, r"bits: 2 is not read"),
        ("gptq", {"checkpoint_format": "marlin"}, r"checkpoint_format: 'marlin' is not read, only gptq and gptq_v2"),
        ("gptq", {"is_marlin_format": True}, r"checkpoint_format: 'marlin' is not read"),
        ("gptq", {"group_size": 0}, r"group_size: 0 is no number of neighbours"),
        ("gptq", {"group_size": 48}, r"q_proj\.weight: has scales for 2 groups, which are not of 48 of its 64 features in each"),
        ("gptq", {"sym": True}, r"q_proj\.weight: zero is not 8 everywhere, so that quantization_config should say sym: false"),
        ("gptq", {"bits": 8}, r"q_proj\.weight: .*bytes of codes, where \[64, 64\] of 8 bits have \[64, 64\]"),
        ("awq", {"version": "gemv"}, r"version: 'gemv' is not read, only gemm"),
        ("awq", {"bits": 8}, r"bits: 8 is not read, only 4;"),
    ],
)
def test_what_a_config_says_and_is_not_read_is_refused(tmp_path: Path, form: str, more: dict[str, Any], sentence: str) -> None:
    written(tmp_path, "llama", FORMS[form])
    change_config(tmp_path, lambda config: config["quantization_config"].update(more))
    with pytest.raises(UserError, match=sentence):
        fw.load_model(tmp_path)


LAYER = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tensors: tensors.pop(f"{LAYER}.qzeros"), rf"{LAYER}\.weight: its files hold codes, and there is no {LAYER}\.qzeros"),
        (lambda tensors: tensors.pop(f"{LAYER}.scales"), rf"{LAYER}\.weight: its files hold codes, and there is no {LAYER}\.scales"),
        (lambda tensors: tensors.update({f"{LAYER}.g_idx": tensors[f"{LAYER}.g_idx"] + 1}), "names groups that are not among its 2"),
        (lambda tensors: tensors.update({f"{LAYER}.qweight": tensors[f"{LAYER}.qweight"][1:].clone()}), "bytes of codes, where"),
        (lambda tensors: tensors.update({f"{LAYER}.qzeros": tensors[f"{LAYER}.qzeros"][1:].clone()}), "words of zero points do not fit"),
        (lambda tensors: tensors.update({f"{LAYER}.bias": torch.ones(64)}), rf"unexpected: {LAYER}\.bias"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, change: Callable[..., object], sentence: str) -> None:
    written(tmp_path, "llama", FORMS["gptq"])
    change_tensors(tmp_path, change)
    with pytest.raises(UserError, match=sentence):
        fw.load_model(tmp_path)


def test_what_older_files_have_more_or_less(tmp_path: Path) -> None:
    """A bias of zeros for layers without, and no groups of columns."""
    theirs = written(tmp_path, "llama", FORMS["gptq"])
    change_tensors(tmp_path, lambda tensors: tensors.update({f"{LAYER}.bias": torch.zeros(64)}))
    change_tensors(tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith("g_idx")])
    assert_same(logits(fw.load_model(tmp_path, dtype=torch.float32)), logits(theirs))


def test_an_order_of_columns_that_is_lost_is_not_guessed(tmp_path: Path) -> None:
    written(tmp_path, "llama", FORMS["gptq"])
    change_tensors(tmp_path, lambda tensors: tensors.pop(f"{LAYER}.g_idx"))
    change_config(tmp_path, lambda config: config["quantization_config"].update(desc_act=True))
    with pytest.raises(UserError, match=rf"desc_act: true, and there is no {LAYER}\.g_idx, which says what group a column is of"):
        fw.load_model(tmp_path)


def test_weights_that_files_hold_transposed_are_refused(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=40, n_embd=64, n_layer=1, n_head=4, n_positions=32)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    parts, _ = packed(FORMS["gptq"], 64, 192, np.random.default_rng(0))
    layer = "transformer.h.0.attn.c_attn"
    change_tensors(tmp_path, lambda tensors: tensors.update({f"{layer}.{key}": value for key, value in parts.items()}))
    change_tensors(tmp_path, lambda tensors: tensors.pop(f"{layer}.weight"))
    change_config(tmp_path, lambda config: config.update(quantization_config=FORMS["gptq"].config()))
    with pytest.raises(UserError, match=rf"{layer}\.weight: codes of a weight that files hold transposed are not read"):
        fw.load_model(tmp_path)
