"""`fw checkpoint export` and `inspect`, and training that begins from a model directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import fw as package
from conftest import column, fw
from models.architectures import save


def test_a_run_is_exported_and_inspected(workspace):
    fw("train", "tiny.yaml", "train.max_steps=2", "train.save_every=2", "checkpoint.max_shard_size=100KB").ok()
    done = fw("checkpoint", "export", "run", "--to", "out", "--dtype", "bf16", "--max-shard-size", "60KB").ok()
    assert "files of weights" in done.out
    names = {path.name for path in Path("out").iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"} <= names
    assert not [n for n in names if "optimizer" in n or "manifest" in n or "trainer" in n or n.endswith(".yaml")]
    source, made = package.load_model("run"), AutoModelForCausalLM.from_pretrained("out")
    assert made.dtype == torch.bfloat16 and json.loads(Path("out/config.json").read_text())["dtype"] == "bfloat16"
    exported = {name: tensor for path in Path("out").glob("*.safetensors") for name, tensor in load_file(path).items()}
    for name, parameter in source.named_parameters():
        stored = source.hf_tensors(name)[0].name
        assert torch.equal(exported[stored], parameter.to(torch.bfloat16)), name
    assert all(path.stat().st_size < 70_000 for path in Path("out").glob("*.safetensors"))
    ids = AutoTokenizer.from_pretrained("out")("the model", return_tensors="pt")["input_ids"]
    torch.testing.assert_close(package.load_model("out", torch.bfloat16)(ids), made(ids).logits, atol=2e-2, rtol=0)

    text = fw("checkpoint", "inspect", "run").ok().out
    parameters = sum(p.numel() for p in source.parameters())
    for words in ("LlamaForCausalLM (read by: llama)", f"{parameters:,}", "step 2, written by 1 rank", "model-00001-of-", "f32"):
        assert words in text, text
    found = json.loads(fw("checkpoint", "inspect", "out", "--json").ok().out)
    assert found["parameters"] == parameters and found["training"] is None and found["tokenizer"] is True
    assert found["dtypes"] == {"bf16": {"tensors": len(exported), "bytes": 2 * parameters}}
    assert sum(shard["tensors"] for shard in found["shards"].values()) == found["tensors"] == len(exported)


def test_wrong_exports_are_refused_and_leave_nothing(workspace):
    save("mixtral", Path("model"))
    for words, says in (
        (("nowhere", "--to", "out"), "no such directory"),
        (("model", "--to", "model"), "exists already"),
        (("model", "--to", "out", "--dtype", "int3"), "--dtype int3 is unknown (there are: fp32, bf16, fp16)"),
        (("model", "--to", "out", "--max-shard-size", "much"), "much"),
        ((".", "--to", "out"), "is no model directory"),
    ):
        done = fw("checkpoint", "export", *words)
        assert done.code == 2 and says in done.err, done.err
    assert not Path("out").exists() and not Path("out.tmp").exists()
    assert fw("checkpoint", "inspect", "corpus.txt").code == 2


@pytest.mark.parametrize("case", ["qwen3_moe", "gpt2"])
def test_training_begins_from_a_directory_and_its_tokenizer(workspace, case):
    """A model that another run has taught goes on where that run was, and its checkpoint is transformers' again."""
    save(case, Path("model"))
    fw(
        "train", "tiny.yaml", "train.max_steps=1", "train.save_every=1", "train.run_dir=first", "data.tokenizer=bpe", "data.vocab_size=300"
    ).ok()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        Path("model", name).write_bytes(Path("first/checkpoints/latest", name).read_bytes())
    words = ("model={name: auto, path: model}", "data.tokenizer=${model.path}", "train.max_steps=4", "train.save_every=4")
    done = fw("train", "tiny.yaml", *words)
    assert done.code == 2 and "model.vocab_size 131 is smaller than the tokenizer's 300" in done.err
    model = AutoModelForCausalLM.from_pretrained("model")
    model.resize_token_embeddings(300)
    model.save_pretrained("model")
    fw("train", "tiny.yaml", *words, "model.fields={attention_dropout: 0.0}" if case != "gpt2" else "model.fields={attn_pdrop: 0.0}").ok()
    batch = torch.tensor([package.load_tokenizer("model").encode("the model reads text")])
    theirs = AutoModelForCausalLM.from_pretrained("run/checkpoints/latest").eval()
    torch.testing.assert_close(package.load_model("run")(batch), theirs(batch).logits, atol=1e-4, rtol=0)
    drift = (theirs(batch).logits - model.eval()(batch).logits).abs().max()
    assert 1e-4 < drift < 3, "trained a little, from the directory's weights and not from others"
    fw("train", "tiny.yaml", "model={name: auto, path: run}", *words[1:2], "train.max_steps=2", "train.run_dir=second").ok()
    assert column("second", "loss")[0] < column("run", "loss")[0] + 0.05


def test_documents_can_be_kept_apart_in_training(workspace):
    """Isolated documents give another loss than documents that see each other, on one rank as on two."""
    words = ("train.max_steps=3", "data.isolate_documents=true")
    Path("many.txt").write_text("\f")
    for n in range(60):
        Path(f"doc{n}.txt").write_text(f"document {n} reads text and learns {n * n}. " * (1 + n % 3))
    files = "data.files=[doc*.txt]"
    fw("train", "tiny.yaml", files, *words, "train.run_dir=apart").ok()
    fw("train", "tiny.yaml", files, *words, "train.run_dir=apart2", "sharding=fsdp", "launch.devices=2").ok()
    fw("train", "tiny.yaml", files, "train.max_steps=3", "train.run_dir=together").ok()
    apart, apart2, together = (column(run, "loss") for run in ("apart", "apart2", "together"))
    assert apart == pytest.approx(apart2, rel=1e-5)
    assert abs(apart[0] - together[0]) > 1e-6


def test_a_tokenizer_that_transformers_would_read_otherwise_is_told_of(workspace):
    """AutoTokenizer gives every model of type qwen2 that architecture's pipeline; fw reads its own files as they are."""
    shape = "hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 32"
    words = ("data.tokenizer=bpe", "data.vocab_size=400", "train.max_steps=1", "train.save_every=1")
    text = "a mo\u0308del"  # which NFC would compose
    for architecture, same in (("qwen2", False), ("qwen3", True)):
        done = fw("train", "tiny.yaml", f"model={{name: {architecture}, {shape}}}", *words, f"train.run_dir={architecture}").ok()
        assert ("warning: transformers' AutoTokenizer rebuilds the tokenizer" in done.err) is not same
        ours = package.load_tokenizer(architecture)
        theirs = AutoTokenizer.from_pretrained(f"{architecture}/checkpoints/latest")
        assert (ours.encode(text) == theirs.encode(text)) is same
        assert ours.decode(ours.encode(text)) == text
    assert package.load_tokenizer("qwen2").encode(text) == package.load_tokenizer("qwen3").encode(text)
    done = fw("train", "tiny.yaml", "model={name: auto, path: qwen3}", "data.tokenizer=byte", "train.max_steps=1", "train.run_dir=b").ok()
    assert "warning: the data's tokenizer is not the one in" in done.err and "data.tokenizer=" in done.err
