"""Weights that stay in the model's files: the same answers from less memory of the process's own."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import LlamaConfig

import fw
import tokens
from fw.checkpointing.pages import coming
from fw.errors import UserError
from fw.kernels.linear import PackedLinear, PlainLinear
from models.architectures import CASES, VOCABULARY, save

FROM_FILES = {"params": "nvme"}
PROMPTS = ["the fox", "a", "what"]


def answers(llm: fw.LLM) -> list[list[int]]:
    return [result.token_ids for result in llm.generate(PROMPTS, temperature=0, max_tokens=9, ignore_eos=True)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_same_answers(tmp_path, case, dtype):
    save(case, tmp_path).to(torch.bfloat16 if dtype == "bf16" else torch.float32).save_pretrained(tmp_path)
    tokens.save(tmp_path, VOCABULARY)
    whole, lean = fw.LLM(tmp_path), fw.LLM(tmp_path, offload=FROM_FILES)
    assert answers(lean) == answers(whole)
    there = lean.model.in_files
    assert {name for name, tensor in there.items() if tensor.dim() != 2} == set() and len(there) >= 2 * len(lean.model.blocks)
    assert not whole.model.in_files
    files = {tensor.data_ptr(): tensor.nbytes for tensor in there.values()}
    if dtype == "fp32":
        assert whole.weight_bytes - lean.weight_bytes == sum(files.values()), "what lies in files takes no memory"
    else:
        assert lean.weight_bytes < whole.weight_bytes - sum(files.values()) / 2


@pytest.fixture(scope="module")
def halves(tmp_path_factory) -> Path:
    """A Llama in bf16."""
    place = tmp_path_factory.mktemp("halves")
    save("llama", place).bfloat16().save_pretrained(place)
    tokens.save(place, VOCABULARY)
    return place


def sizes(llm: fw.LLM) -> dict[str, int]:
    return {name: tensor.nbytes for name, tensor in llm.model.in_files.items()}


def test_what_a_budget_keeps(halves):
    """The embedding leaves first, then the last layers of the last block."""
    every = sizes(fw.LLM(halves, offload=FROM_FILES))
    with safe_open(next(halves.glob("*.safetensors")), "pt") as file:
        total = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118 - it is no mapping
    small = total - sum(every.values())
    assert not sizes(fw.LLM(halves, offload={**FROM_FILES, "budget": f"{total}B"}))
    embedding = every["embed_tokens.weight"]
    llm = fw.LLM(halves, offload={**FROM_FILES, "budget": f"{total - embedding}B"})
    assert list(sizes(llm)) == ["embed_tokens.weight"]
    assert all(type(module) is PackedLinear for module in llm.model.modules() if isinstance(module, PackedLinear))
    first = sum(size for name, size in every.items() if name.startswith(("lm_head", "layers.0.")))
    llm = fw.LLM(halves, offload={**FROM_FILES, "budget": f"{first + small}B"})
    assert not any(name.startswith(("lm_head", "layers.0.")) for name in sizes(llm))
    assert set(sizes(llm)) >= {name for name in every if name.startswith("layers.1.") and "q_proj" not in name and "k_proj" not in name}
    kinds = {type(module) for module in llm.model.blocks[0].modules() if isinstance(module, PackedLinear)}
    assert kinds == {PackedLinear} and {PlainLinear} <= {type(m) for m in llm.model.blocks[1].modules()}
    assert answers(llm) == answers(fw.LLM(halves))


def test_some_by_name(halves):
    llm = fw.LLM(halves, offload={**FROM_FILES, "modules": ["layers.1", "layers.0.mlp.up*"]})
    assert set(sizes(llm)) == {name for name in sizes(fw.LLM(halves, offload=FROM_FILES)) if "layers.1." in name or "0.mlp.up" in name}


def test_tied_weights_are_used_where_they_lie(tmp_path):
    theirs = save("llama-mha-tied", tmp_path)
    theirs.bfloat16().save_pretrained(tmp_path)
    tokens.save(tmp_path, VOCABULARY)
    llm = fw.LLM(tmp_path, offload=FROM_FILES)
    assert "embed_tokens.weight" in llm.model.in_files
    (result,) = llm.generate([PROMPTS[0]], temperature=0, max_tokens=1, prompt_logprobs=0)
    ids = torch.tensor([llm.encode(PROMPTS[0])])
    with torch.no_grad():
        expected = theirs.float()(ids).logits[0].log_softmax(-1)
    right = [float(expected[row, token]) for row, token in enumerate(ids[0, 1:].tolist())]
    assert result.prompt_logprobs == pytest.approx(right, abs=0.05), "of bf16"


@pytest.mark.parametrize(
    ("offload", "options", "says"),
    [
        ({"params": "cpu"}, {}, "offload.params: cpu is where the model computes; nvme leaves weights in their files"),
        (FROM_FILES, {"weights": "w8a8"}, "inference.weights: w8a8 makes codes, which are in no file; with offload.params use auto"),
        ({**FROM_FILES, "budget": "100B"}, {}, r"offload.budget: 100 B, and .* of weights cannot stay in the files"),
        ({**FROM_FILES, "budget": "1KiB"}, {"dtype": "fp32"}, r"as the model computes with it \(here in float32\), and .* holds none so"),
        ({**FROM_FILES, "modules": ["nowhere"]}, {}, "offload.modules: no parameter of the model is in 'nowhere'"),
        ({**FROM_FILES, "path": "x"}, {}, "offload.path: weights stay in the files they are in; leave it out"),
        ({"optimizer": "cpu"}, {}, "offload.optimizer: generating has none that are kept; leave it out"),
        ({"budget": "1GiB"}, {}, "offload.budget: parameters stay on the device; leave it out, or set offload.params"),
    ],
)
def test_what_cannot_be(halves, offload, options, says):
    with pytest.raises(UserError, match=says):
        fw.LLM(halves, offload=offload, **options)


def test_what_is_needed_soon_is_read(tmp_path):
    """A file that the system has dropped from memory comes back without anybody touching it."""
    if sys.platform != "linux":
        pytest.skip("asks Linux")
    save_file({"x": torch.randn(1 << 20)}, tmp_path / "x.safetensors")
    with (tmp_path / "x.safetensors").open("r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    mapped = torch.from_file(str(tmp_path / "x.safetensors"), shared=True, size=1 << 20)
    pages = (mapped.nbytes + mmap.PAGESIZE - 1) // mmap.PAGESIZE
    there = (ctypes.c_ubyte * pages)()

    def in_memory() -> int:
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(mapped.data_ptr()), ctypes.c_size_t(mapped.nbytes), there) == 0
        return sum(page & 1 for page in there)

    if in_memory():
        pytest.skip("this file system keeps its files in memory")
    coming(mapped)
    assert any(in_memory() == pages for _ in range(1_000_000)), "it is read meanwhile"


_LEAN = """
import json, sys
import fw
from fw.meter.memory import anonymous_bytes
directory, offload = sys.argv[1], json.loads(sys.argv[2])
llm = fw.LLM(directory, offload=offload, kv_budget="40MiB", max_context=700)
most, runs = anonymous_bytes(), []
def look(*_):
    global most
    most = max(most, anonymous_bytes())
for block in llm.model.blocks:
    block.register_forward_hook(look)
prompts = [[3 + (7 * i * i + 5 * n) % 900 for i in range(300 + 40 * n)] for n in range(3)]
found = llm.generate(prompts, temperature=0, max_tokens=60, ignore_eos=True)
print(json.dumps([most, llm.engine.scheduler.preemptions, [result.token_ids for result in found]]))
"""


def test_two_gigabytes_from_half_of_them(tmp_path):
    """A model of 2 GB, whose keys and values do not fit either: less than 1 GiB of the process's own, and the same tokens."""
    config = LlamaConfig(
        hidden_size=2048, num_hidden_layers=20, num_attention_heads=16, num_key_value_heads=4, intermediate_size=5632, vocab_size=32000,
        max_position_embeddings=1024, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    tokens.save(tmp_path, 1000)
    values = torch.randn(32000 * 2048, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    held = {"model.embed_tokens.weight": (32000, 2048), "lm_head.weight": (32000, 2048), "model.norm.weight": (2048,)}
    for layer in range(20):
        of = {"self_attn.q_proj": (2048, 2048), "self_attn.k_proj": (512, 2048), "self_attn.v_proj": (512, 2048)}
        of |= {"self_attn.o_proj": (2048, 2048), "mlp.gate_proj": (5632, 2048), "mlp.up_proj": (5632, 2048), "mlp.down_proj": (2048, 5632)}
        of |= {"input_layernorm": (2048,), "post_attention_layernorm": (2048,)}
        held |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of.items()}
    tensors = {}
    for number, (name, shape) in enumerate(held.items()):
        size = torch.Size(shape).numel()
        begin = number * 4099 % (len(values) - size + 1)
        tensors[name] = values[begin : begin + size].view(shape).clone() if len(shape) == 2 else torch.ones(shape, dtype=torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    del tensors
    assert (tmp_path / "model.safetensors").stat().st_size > 2e9
    found = {}
    for way, offload in (("whole", {}), ("lean", {"params": "nvme", "budget": "400MiB"})):
        told = subprocess.run([sys.executable, "-c", _LEAN, str(tmp_path), json.dumps(offload)], capture_output=True, text=True, check=True)
        found[way] = json.loads(told.stdout.splitlines()[-1])
    assert found["lean"][2] == found["whole"][2]
    assert found["lean"][0] < 1 << 30 < found["whole"][0]
    assert found["lean"][1] > 0, "keys and values did not fit"
