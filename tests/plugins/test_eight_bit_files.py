"""int8: from transformers to fw and back, bit for bit; and what it costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fw
import tokens
from conftest import fw as command
from fw.errors import UserError

bitsandbytes = pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers")

IDS = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(1))
CONFIG = transformers.LlamaConfig(
    vocab_size=40, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """In bf16."""
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(CONFIG).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def theirs_of(place: Path, **more):
    return transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.bfloat16, device_map="cpu", **more)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        found = model(IDS)
    return getattr(found, "logits", found).float()


def test_what_transformers_writes_is_read_as_it_is(base: Path) -> None:
    theirs = theirs_of(base, quantization_config=transformers.BitsAndBytesConfig(load_in_8bit=True))
    theirs.save_pretrained(base.parent / "theirs")
    written = load_file(base.parent / "theirs" / "model.safetensors")
    ours = fw.load_model(base.parent / "theirs", dtype=torch.bfloat16)
    again = fw.load_model(base, dtype=torch.bfloat16, quantization="int8")
    assert len(ours.quantized) == 14
    for name in ours.quantized:
        (of,) = ours.hf_tensors(name)
        codes = ours.get_parameter(name)
        assert codes.dtype == torch.int8 and torch.equal(codes, written[of.name]) and torch.equal(codes, again.get_parameter(name))
        scales = ours.get_parameter(name.replace(".weight", ".weight_absmax")).view(torch.float32)
        assert torch.equal(scales, written[of.name.replace(".weight", ".SCB")].flatten())
    dense = logits(theirs_of(base))
    assert (logits(theirs) - logits(ours)).norm() <= 3e-2 * dense.norm()
    assert (logits(ours) - dense).norm() < (logits(theirs) - dense).norm() <= 3e-2 * dense.norm(), (
        "who does not round activations is nearer"
    )


def test_what_fw_writes_is_read_by_transformers(base: Path) -> None:
    ours = fw.load_model(base, dtype=torch.bfloat16, quantization="int8")
    made = fw.save_model(ours, base.parent / "ours")
    theirs_of(base, quantization_config=transformers.BitsAndBytesConfig(load_in_8bit=True)).save_pretrained(base.parent / "theirs")
    mine, their = (load_file(place / "model.safetensors") for place in (made, base.parent / "theirs"))
    assert mine.keys() == their.keys()
    assert all(torch.equal(mine[name].flatten(), their[name].flatten()) and mine[name].dtype == their[name].dtype for name in mine)
    configs = [json.loads((place / "config.json").read_text())["quantization_config"] for place in (made, base.parent / "theirs")]
    assert configs[0]["load_in_8bit"] is configs[1]["load_in_8bit"] is True and configs[0]["quant_method"] == configs[1]["quant_method"]
    again = fw.load_model(made, dtype=torch.bfloat16)
    kept = dict(ours.named_parameters())
    assert all(torch.equal(parameter, kept[name]) for name, parameter in again.named_parameters())
    assert (logits(theirs_of(made)) - logits(again)).norm() <= 3e-2 * logits(again).norm()


@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_a_head_that_is_the_embedding_stays_so_in_transformers(tmp_path: Path, quantization: str) -> None:
    torch.manual_seed(0)
    tied = transformers.LlamaConfig(**{**CONFIG.to_dict(), "tie_word_embeddings": True})
    transformers.LlamaForCausalLM(tied).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    made = fw.save_model(fw.load_model(tmp_path / "base", dtype=torch.bfloat16, quantization=quantization), tmp_path / "made")
    assert json.loads((made / "config.json").read_text())["quantization_config"]["llm_int8_skip_modules"] == ["lm_head"]
    expected = logits(fw.load_model(made, dtype=torch.bfloat16))
    assert (logits(theirs_of(made)) - expected).norm() <= 3e-2 * expected.norm()


def test_half_of_the_bytes_and_an_error_below_a_hundredth(base: Path) -> None:
    ours, plain = fw.load_model(base, dtype=torch.bfloat16, quantization="int8"), fw.load_model(base, dtype=torch.bfloat16)
    for name, weight in ours.quantized.items():
        kept = sum(ours.get_parameter(part).nbytes for part in weight.kept)
        dense = plain.get_parameter(name)
        assert kept == dense.numel() + 4 * len(dense)
        back = ours.get_submodule(name.removesuffix(".weight")).dense_weight(torch.float32)
        step = dense.float().abs().amax(1, keepdim=True) / 127
        assert ((back - dense.float()).abs() <= 0.51 * step).all()


def test_generates_the_same_by_codes_as_by_weights(base: Path, tmp_path: Path) -> None:
    made = fw.save_model(fw.load_model(base, dtype=torch.float32, quantization="int8"), tmp_path / "made")
    tokens.save(made, 40)
    prompts = [[5, 6, 7], [9, 11]]
    found = []
    for quantization in (None, "none"):
        llm = fw.LLM(made, dtype="fp32", device="cpu", quantization=quantization)
        found.append([result.token_ids for result in llm.generate(prompts, max_tokens=8, temperature=0, ignore_eos=True)])
    assert found[0] == found[1]


def test_an_adapter_trains_beside_it_on_two_ranks_as_on_one(base: Path, workspace: Path) -> None:
    options = ["model={name: auto, path: base}", "quantization=int8", "peft={name: lora, targets: [all-linear]}", "precision=bf16"]
    data = "data={name: synthetic, vocab_size: 40, samples: 64}"
    losses = []
    for name, more in (("one", []), ("two", ["sharding=fsdp", "launch.devices=2"])):
        command("train", "tiny.yaml", *options, data, "train.max_steps=4", f"train.run_dir={name}", *more).ok()
        rows = (workspace / name / "metrics.csv").read_text().splitlines()
        column = rows[0].split(",").index("loss")
        losses.append([float(row.split(",")[column]) for row in rows[1:] if row.split(",")[column]])
    assert losses[0] == pytest.approx(losses[1], rel=5e-3) and losses[0][-1] < losses[0][0]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tensors, layer: tensors.update({f"{layer}.SCB": torch.ones(3)}), "rows of codes and 3 scales"),
        (lambda tensors, layer: tensors.update({f"{layer}.weight": tensors[f"{layer}.weight"].float()}), "not codes of 8 bits"),
        (lambda tensors, layer: tensors.update({f"{layer}.weight_format": torch.tensor(1, dtype=torch.uint8)}), "in tiles of a GPU"),
    ],
)
def test_files_that_are_wrong_are_refused(base: Path, change, sentence) -> None:
    made = fw.save_model(fw.load_model(base, dtype=torch.bfloat16, quantization="int8"), base.parent / "ours")
    tensors = load_file(made / "model.safetensors")
    change(tensors, "model.layers.0.mlp.down_proj")
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=sentence):
        fw.load_model(made, dtype=torch.bfloat16)
