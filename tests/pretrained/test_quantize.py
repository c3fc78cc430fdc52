"""`fw quantize`: what it writes, read by transformers; perplexities against transformers' own."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fw
from conftest import fw as run_fw
from fw.checkpointing.quantized_files import weights_of
from fw.checkpointing.tensor_files import weights_for
from fw.cli import main
from fw.kinds.data import IGNORED
from fw.pretrained.block_by_block import BlockByBlock
from fw.pretrained.calibration import calibration_text
from perplexity import HELD_OUT, LENGTH, perplexity as theirs

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

TEXT = ["--text", "python-docs"]
FEW = ["--samples", "48", "--held-out", str(HELD_OUT), "--length", str(LENGTH)]


def quantized(model: Path, to: Path, *words: str) -> dict:
    found = run_fw("quantize", str(model), "--to", str(to), "--group-size", "32", *FEW, *TEXT, "--json", *words).ok()
    return json.loads(found.out)


def test_gptq_is_better_than_rounding_and_8_bits_cost_nothing(trained: Path, tmp_path: Path) -> None:
    rounded = quantized(trained, tmp_path / "rtn", "--method", "rtn")
    fitted = quantized(trained, tmp_path / "gptq")
    eight = quantized(trained, tmp_path / "eight", "--bits", "8", "--method", "rtn")
    scaled = quantized(trained, tmp_path / "awq", "--method", "awq")
    assert rounded["perplexity_before"] == fitted["perplexity_before"] < 80, "it has learnt something"
    assert fitted["perplexity_after"] < rounded["perplexity_after"] and rounded["perplexity_before"] < rounded["perplexity_after"]
    assert abs(eight["perplexity_after"] / eight["perplexity_before"] - 1) < 1e-3
    assert fitted["layers"] == 21 and fitted["tokens"] == 12 * 128
    for found in (rounded, fitted, eight, scaled):
        assert theirs(Path(found["directory"])) == pytest.approx(found["perplexity_after"], rel=1e-4)
        assert found["peak_bytes"] <= found["estimated_bytes"]
        files = sum(file.stat().st_size for file in Path(found["directory"]).glob("*.safetensors"))
        assert found["bytes_after"] < files < found["bytes_after"] + 20_000
        assert not (Path(found["directory"]) / "spool").exists()
    plain = tmp_path / "plain"
    assert main(["checkpoint", "export", str(trained), "--to", str(plain)]) == 0
    assert theirs(plain) == pytest.approx(fitted["perplexity_before"], rel=1e-4)


def test_what_is_written_is_what_was_measured(trained: Path, tmp_path: Path) -> None:
    """fw's own model of the directory, and all that was not quantized as it was."""
    found = quantized(trained, tmp_path / "q", "--asymmetric")
    model = fw.load_model(tmp_path / "q")
    text = calibration_text(["python-docs"], tmp_path / "q", 1, 12, 128, lambda said: None)
    with torch.no_grad():
        logits = model(text.held_out_ids_ML)
    loss = F.cross_entropy(logits.flatten(0, 1), text.held_out_labels_ML.flatten(), ignore_index=IGNORED)
    assert math.exp(loss) == pytest.approx(found["perplexity_after"], rel=1e-4)
    before = fw.load_model(trained)
    untouched = {name for name, _ in before.named_parameters()} - set(model.quantized)
    assert len(untouched) == 9 and all(torch.equal(before.get_parameter(n), model.get_parameter(n)) for n in untouched)


def test_bad_input_is_one_sentence_and_leaves_nothing(trained: Path, tmp_path: Path) -> None:
    def refused(*words: str) -> str:
        found = run_fw("quantize", str(trained), "--to", str(tmp_path / "no"), *words)
        assert found.code == 2 and not (tmp_path / "no").exists() and not list(tmp_path.glob(".no*"))
        return found.err.splitlines()[-1]

    assert "--method best: w4a16 knows rtn, gptq, awq" in refused("--method", "best")
    assert "48 does not divide the 64 features" in refused("--group-size", "48")
    fits = ["--group-size", "32"]
    assert "--memory: 1 MiB is less than" in refused(*fits, *FEW, "--memory", "1MiB")
    assert "--length: 4096 is more than the 128 positions" in refused(*fits, "--length", "4096")
    assert "--text: data: 23 tokens of training text fill no sequence of 128; give more text or set --length to 22" in refused(
        *fits, "--text", *_short(tmp_path)
    )
    assert "--dtype fp4 is unknown" in refused(*fits, "--dtype", "fp4")


def _short(place: Path) -> list[str]:
    files = [place / name for name in ("one.txt", "two.txt")]
    for file in files:
        file.write_text(f"one line of {file.stem}\n" * 3)
    return list(map(str, files))


def test_layers_that_files_hold_otherwise_are_refused(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=24, n_embd=16, n_layer=2, n_head=4, n_positions=16)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    found = run_fw("quantize", str(tmp_path / "gpt2"), "--to", str(tmp_path / "q"), "--group-size", "8")
    assert found.code == 2 and "is no tensor of its own in files" in found.err


MODELS = {
    "llama": transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
    ),
    "gpt2": transformers.GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=32),
    "gemma3": transformers.Gemma3TextConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=8,
        pad_token_id=0,
    ),
    "mixtral": transformers.MixtralConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_block_by_block_is_the_model(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(MODELS[name]).save_pretrained(tmp_path / "model")
    whole = fw.load_model(tmp_path / "model")
    with torch.device("meta"):
        meta = type(whole)(whole.config, whole.vocab_size, 16, whole.attention)
    runner = BlockByBlock(meta, weights_for(weights_of(tmp_path / "model"), meta), torch.device("cpu"))
    ids = torch.randint(0, 40, (3, 16), generator=torch.Generator().manual_seed(0))
    x = runner.embedded(ids)
    for number, block in enumerate(meta.blocks):
        assert all(p.is_meta for p in block.parameters()), "before its turn"
        with runner.block(number):
            x = runner.through(number, x)
        assert all(p.is_meta for p in block.parameters()), "and after it"
    with torch.no_grad():
        assert torch.equal(runner.read_out(ids, x, lambda x, head, _: head(x)), whole(ids))
