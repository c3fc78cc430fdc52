"""Weights in page-locked host memory and in files, brought to a GPU block by block: the same logits, the memory that was planned."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import fw
import tokens
from conftest import fw as command
from fw.kernels.copies import host_memory
from fw.kinds.offload import OffloadPolicy
from fw.planning.ask import plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
GPU, BLOCKS, VOCABULARY = torch.device("cuda"), 9, 512
SHAPE = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4}
BLOCK = 2 * (1024 * (2 * 1024 + 2 * 256) + 3 * 1024 * 4096)
"""Bytes of a block's matrices in bf16."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, num_hidden_layers=BLOCKS, vocab_size=VOCABULARY, max_position_embeddings=1024, tie_word_embeddings=False)
    LlamaForCausalLM(config).bfloat16().save_pretrained(place)
    tokens.save(place, VOCABULARY)
    return place


def logits(model: torch.nn.Module) -> Tensor:
    """Of prompts one after another, without waiting between them."""
    with torch.no_grad():
        return torch.stack([model(torch.arange(at, at + 256, device=GPU)[None] % VOCABULARY) for at in range(8)])


POLICIES = {
    "host": OffloadPolicy(params="cpu"),
    "files": OffloadPolicy(params="nvme"),
    "both": OffloadPolicy(params="nvme", host_budget=4 * BLOCK),
    "some": OffloadPolicy(params="cpu", budget=8 * BLOCK),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_logits(directory, policy):
    whole = logits(fw.load_model(directory, torch.bfloat16, GPU))
    model = fw.load_model(directory, torch.bfloat16, GPU, offload=POLICIES[policy])
    for _ in range(3):
        assert torch.equal(logits(model), whole)


def test_what_it_takes(directory):
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = fw.load_model(directory, torch.bfloat16, GPU, offload=POLICIES["host"])
    rest = sum(p.nbytes for name, p in model.named_parameters() if name not in model.elsewhere)
    assert torch.cuda.memory_allocated() - before == pytest.approx(rest + 2 * BLOCK, abs=1 << 16), "the allocator rounds up"
    assert all(tensor.is_pinned() for tensor in model.elsewhere.values())


def test_page_locked_to_the_byte_and_let_go():
    free = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        memory = host_memory([5_000_001], torch.uint8)
        assert memory.is_pinned() and memory.nbytes == 5_000_001
        on_gpu = memory.fill_(7).to(GPU, non_blocking=True)
        assert int(on_gpu.sum()) == 7 * 5_000_001
        del memory
        gc.collect()
    assert torch.cuda.mem_get_info()[0] >= free - (64 << 20)


def answers(llm: fw.LLM) -> list[list[int]]:
    return [result.token_ids for result in llm.generate([[1, 2, 3], [9] * 40], temperature=0, max_tokens=24, ignore_eos=True)]


@pytest.mark.parametrize("offload", [{"params": "cpu"}, {"params": "nvme"}, {"params": "auto", "max_memory": {"device": f"{6 * BLOCK}B"}}])
def test_the_same_answers(directory, tmp_path, offload):
    """In fp32, where joined products, which others are, round too little to choose another token."""
    LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).save_pretrained(tmp_path)
    tokens.save(tmp_path, VOCABULARY)
    whole, lean = fw.LLM(tmp_path, kv_budget="64MiB"), fw.LLM(tmp_path, offload=offload, kv_budget="64MiB")
    assert answers(lean) == answers(whole)
    assert len(lean.model.elsewhere) >= 7 * 3


def test_what_was_planned(directory):
    words = ["inference.dtype=bf16", "inference.kv_budget=64MiB", "inference.max_sequences=4", "offload.params=cpu"]
    planned = plan(directory, *words).largest
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    llm = fw.LLM(directory, dtype="bf16", kv_budget="64MiB", max_sequences=4, offload={"params": "cpu"})
    load = torch.cuda.max_memory_allocated() - before
    assert planned.phases["load"].allocated_peak == pytest.approx(load, rel=0.01)
    answers(llm)
    assert torch.cuda.max_memory_allocated() - before <= planned.allocated_peak * 1.01


RUN = """
model: {{name: auto, path: {base}}}
peft: {{name: lora, rank: 8, targets: [all-linear]}}
data: {{name: synthetic, vocab_size: 512, samples: 64}}
train: {{global_batch_size: 4, micro_batch_size: 2, sequence_length: 256, max_steps: 4, save_every: 4, run_dir: run, sample_tokens: 0}}
optimizer: {{name: adamw, lr: 1.0e-2}}
precision: bf16
launch: {{accelerator: cuda, devices: 1}}
"""


WAYS = [[], ["activation=full"], ["activation=selective"], ["offload.activations=cpu"], ["quantization=nf4"]]


@pytest.mark.parametrize("words", WAYS, ids=" ".join)
def test_what_trains_is_the_same(directory, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN.format(base=directory))
    trained = []
    places = ["device", "cpu", "nvme"] if words != ["quantization=nf4"] else ["device", "cpu"]
    for place in places:
        command("train", "run.yaml", *words, f"train.run_dir={place}", f"offload.params={place}").ok()
        trained.append(load_file(tmp_path / place / "checkpoints" / "latest" / "adapter_model.safetensors"))
    for found in trained[1:]:
        assert found.keys() == trained[0].keys() and all(torch.equal(found[name], trained[0][name]) for name in found)
