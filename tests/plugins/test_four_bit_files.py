"""Directories of 4-bit weights, from transformers to fw and back, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fw
from fw.checkpointing.quantized_files import weights_of
from fw.cli import main
from fw.errors import UserError
from fw.kinds import make
from fw.kinds.quantization import QuantizationPlugin
from live import assemblies

bitsandbytes = pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

IDS = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(1))
CONFIG = transformers.LlamaConfig(
    vocab_size=40, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
KINDS = [("nf4", 64, True), ("nf4", 64, False), ("fp4", 64, True), ("nf4", 256, True), ("nf4", 128, False), ("fp4", 32, True)]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """In bf16."""
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(CONFIG).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def settings(kind: str, double: bool):
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=double, bnb_4bit_compute_dtype=torch.bfloat16
    )


def theirs_of(base: Path, kind: str, double: bool, block: int | None = None):
    """transformers' own; it knows blocks of 64 alone, so that others are quantized by bitsandbytes, layer by layer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        base, quantization_config=settings(kind, double), dtype=torch.bfloat16, device_map="cpu"
    )
    if block is not None:
        plain = load_file(base / "model.safetensors")
        for name, module in model.named_modules():
            if isinstance(module, bitsandbytes.nn.Linear4bit):
                values = plain[f"{name}.weight"]
                module.weight = bitsandbytes.nn.Params4bit(
                    values, requires_grad=False, blocksize=block, compress_statistics=double, quant_type=kind, module=module
                ).to("cpu")
    return model


def plugin(kind: str, block: int, double: bool = True, **more: object) -> QuantizationPlugin:
    return make(QuantizationPlugin, kind, block_size=block, double_quantization=double, **more)


def logits(model, ids=IDS) -> torch.Tensor:
    with torch.no_grad():
        found = model(ids)
    return getattr(found, "logits", found).float()


@pytest.mark.parametrize("kind, block, double", KINDS)
def test_what_transformers_writes_is_read_as_it_is(base: Path, kind: str, block: int, double: bool) -> None:
    theirs = theirs_of(base, kind, double, block)
    there = base.parent / "theirs"
    theirs.save_pretrained(there)
    codes = {name: theirs.get_parameter(name).clone() for name in load_file(there / "model.safetensors") if name.endswith("proj.weight")}
    ours = fw.load_model(there, dtype=torch.bfloat16)
    assert len(ours.quantized) == 14 and ours.quantization is not None
    for name in ours.quantized:
        (of,) = ours.hf_tensors(name)
        assert torch.equal(ours.get_parameter(name).flatten(), codes[of.name].flatten()), name
        state = theirs.get_parameter(of.name).quant_state
        assert state.blocksize == block and ours.get_submodule(name.removesuffix(".weight")).layout.block == block
        dense = bitsandbytes.functional.dequantize_4bit(codes[of.name], state)
        assert torch.equal(ours.get_submodule(name.removesuffix(".weight")).dense_weight(torch.bfloat16), dense), name
    again = fw.load_model(base, dtype=torch.bfloat16, quantization=plugin(kind, block, double))
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True)), "as quantized while reading"
    expected, found = logits(theirs), logits(ours)
    assert (found - expected).norm() <= 1e-2 * expected.norm()


def test_blocks_of_several_sizes_stay_what_they_are(base: Path) -> None:
    """As a directory has them of which some layers were quantized apart."""
    theirs = theirs_of(base, "nf4", True, 128)
    other = theirs_of(base, "nf4", False, 256).model.layers[1].mlp.up_proj
    theirs.model.layers[1].mlp.up_proj.weight = other.weight
    theirs.save_pretrained(base.parent / "mixed")
    ours = fw.load_model(base.parent / "mixed", dtype=torch.bfloat16)
    sizes = {name: ours.get_submodule(name.removesuffix(".weight")).layout.block for name in ours.quantized}
    assert {name: size for name, size in sizes.items() if size != 128} == {"layers.1.mlp.up_proj.weight": 256}
    expected = bitsandbytes.functional.dequantize_4bit(other.weight, other.weight.quant_state)
    assert torch.equal(ours.get_submodule("layers.1.mlp.up_proj").dense_weight(torch.bfloat16), expected)
    expected, found = logits(theirs), logits(ours)
    assert (found - expected).norm() <= 1e-2 * expected.norm()
    again = fw.load_model(fw.save_model(ours, base.parent / "again"), dtype=torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("kind, block", [("nf4", 64), ("fp4", 64), ("nf4", 256), ("fp4", 128)])
def test_what_fw_writes_is_read_by_transformers(base: Path, kind: str, block: int) -> None:
    ours = fw.load_model(base, dtype=torch.bfloat16, quantization=plugin(kind, block))
    kept = {name: parameter.clone() for name, parameter in ours.named_parameters()}
    made = fw.save_model(ours, base.parent / "ours")
    config = json.loads((made / "config.json").read_text())
    assert config["quantization_config"]["bnb_4bit_quant_type"] == kind
    assert sum(file.stat().st_size for file in made.glob("*.safetensors")) < 0.6 * (base / "model.safetensors").stat().st_size

    again = fw.load_model(made, dtype=torch.bfloat16)
    assert {name: parameter.shape for name, parameter in again.named_parameters()} == {name: p.shape for name, p in kept.items()}
    assert all(torch.equal(parameter, kept[name]) for name, parameter in again.named_parameters())

    reference = {name: p for name, p in theirs_of(base, kind, True, block).named_parameters() if name.endswith("proj.weight")}
    written = load_file(made / "model.safetensors")
    for name, parameter in reference.items():
        state = parameter.quant_state.as_dict(packed=True)
        assert torch.equal(written[name].flatten(), parameter.flatten())
        for key, value in state.items():
            mine = written[f"{name}.{key}"]
            if "quant_state" in key:
                assert json.loads(bytes(mine.tolist())) == json.loads(bytes(value.tolist()))
            else:
                assert torch.equal(mine, value), key

    theirs = transformers.AutoModelForCausalLM.from_pretrained(made, dtype=torch.bfloat16, device_map="cpu")
    assert {theirs.get_parameter(name).quant_state.blocksize for name in reference} == {block}
    expected, found = logits(theirs), logits(again)
    assert (found - expected).norm() <= 1e-2 * expected.norm()


def test_weights_are_made_of_codes_where_that_is_wanted(base: Path) -> None:
    ours = fw.load_model(base, dtype=torch.bfloat16, quantization="nf4")
    made = fw.save_model(ours, base.parent / "ours")
    dense = fw.load_model(made, dtype=torch.bfloat16, quantization="none")
    assert not dense.quantized
    for name, weight in ours.quantized.items():
        module = ours.get_submodule(name.removesuffix(".weight"))
        assert torch.equal(dense.get_parameter(name), module.dense_weight(weight.dtype)), name
    assert (logits(dense) - logits(ours)).norm() <= 1e-2 * logits(ours).norm()
    other = fw.load_model(made, dtype=torch.bfloat16, quantization="fp4")  # codes of another kind, of what the first stand for
    for name, weight in other.quantized.items():
        assert all(torch.equal(other.get_parameter(part), value) for part, value in weight.quantize(dense.get_parameter(name)).items())


def test_merging_into_a_base_of_4_bits_is_merging_into_what_it_stands_for(base: Path, tmp_path: Path) -> None:
    quantized = fw.save_model(fw.load_model(base, dtype=torch.bfloat16, quantization="nf4"), tmp_path / "quantized")
    torch.manual_seed(1)
    model = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(quantized, dtype=torch.bfloat16, device_map="cpu"),
        peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    )
    model.save_pretrained(tmp_path / "adapter")
    words = ["checkpoint", "merge", quantized, tmp_path / "adapter", "--to", tmp_path / "merged", "--dtype", "bf16"]
    assert main([str(word) for word in words]) == 0
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16)
    files = weights_of(quantized)
    for name, _ in model.named_parameters():
        if not name.endswith("lora_A.default.weight"):
            continue
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.default.weight")
        module = model.get_submodule(name.removesuffix(".lora_A.default.weight"))
        change = module.get_delta_weight("default").float()
        expected = files.whole(f"{layer}.weight").float() + change
        assert torch.equal(merged.get_parameter(f"{layer}.weight"), expected.to(torch.bfloat16)), layer
        assert change.norm() > 0
    unmerged = fw.load_model(quantized, dtype=torch.bfloat16, adapter=tmp_path / "adapter")
    expected, found = logits(unmerged), logits(merged)
    assert (found - expected).norm() <= 2e-2 * expected.norm()


@pytest.mark.parametrize("block", [64, 256])
def test_training_begins_from_4_bits_and_keeps_them(
    workspace: Path, base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], block: int
) -> None:
    """The codes that layers hold after training are those of the files, and what trained beside them is in the adapter."""
    theirs = theirs_of(base, "nf4", True, block)
    made = workspace / "quantized"
    theirs.save_pretrained(made)
    tokenizer = transformers.PreTrainedTokenizerFast
    (made / "tokenizer.json").write_text(_tokenizer())
    (made / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<e>", "tokenizer_class": tokenizer.__name__}))
    common = [
        "model={name: auto, path: quantized}",
        "peft=lora",
        "data.tokenizer=quantized",
        "train.max_steps=2",
        "train.save_every=2",
        "train.gradient_clip_norm=0.5",
        "optimizer={name: adamw, lr: 1e-2, weight_decay: 0.1}",
        "precision=bf16",
    ]
    runs = assemblies(monkeypatch)
    assert main(["train", "tiny.yaml", *common, f"quantization={{name: nf4, block_size: {block}}}", "train.run_dir=kept"]) == 0
    live = runs[0].model
    codes = load_file(made / "model.safetensors")
    assert len(live.quantized) == 14
    for name in live.quantized:
        (of,) = live.hf_tensors(name)
        layer = live.get_submodule(name.removesuffix(".weight"))
        state = theirs.get_parameter(of.name).quant_state
        assert torch.equal(layer.weight.flatten(), codes[of.name].flatten()), name
        assert torch.equal(layer.weight_absmax, codes[f"{of.name}.absmax"]) and layer.layout.block == block
        assert torch.equal(layer.weight_nested.view(torch.float32), codes[f"{of.name}.nested_absmax"])
        assert torch.equal(layer.weight_offset.view(torch.float32), state.offset.view(1))
        assert layer.lora_B.norm() > 0, "it did train"
    frozen = {name: p for name, p in live.named_parameters() if not p.requires_grad and p.is_floating_point()}
    assert len(frozen) == 7, "embedding, head and norms"
    for name, parameter in frozen.items():
        (of,) = live.hf_tensors(name)
        assert torch.equal(parameter, codes[of.name].to(parameter.dtype)), name
    assert "quantized anew" not in capsys.readouterr().err
    other = f"quantization={{name: nf4, block_size: {block // 2}}}"
    assert main(["train", "tiny.yaml", *common, other, "train.run_dir=anew"]) == 0
    assert "warning: quantized holds other codes than quantization says" in capsys.readouterr().err.replace(f"{workspace}/", "")
    tuned = fw.load_model("kept", dtype=torch.bfloat16)
    assert live.adapters is not None and all(
        torch.equal(tuned.get_parameter(n), live.get_parameter(n).bfloat16()) for n in live.adapters.added
    )


def _tokenizer() -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<e>": 0, "<u>": 1} | {chr(ord("a") + n): n + 2 for n in range(26)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<u>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return backend.to_str()


def test_what_no_plugin_reads_is_refused(base: Path) -> None:
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gguf"}}))
    with pytest.raises(
        UserError, match=r"quantization_config: no quantization plugin reads these weights:.* 'gguf' \(there are: awq, bitsandbytes"
    ):
        fw.load_model(base)
