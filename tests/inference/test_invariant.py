"""What ``inference.batch_invariant`` promises: an answer is the same to the last bit, whatever its company."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import fw
import tokens
from fw.errors import UserError
from fw.kernels.fixed_rows import fixed_rows, rows_of_products
from fw_models.layers import RMSNorm
from fw_plugins.kv_cache import in_blocks
from fw_plugins.kv_cache.attending import attend, attend_in_tiles
from fw_plugins.kv_cache.paged import Paged
from models.architectures import VOCABULARY

BASE = {"batch_invariant": True, "max_context": 250}
SETTINGS = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 2, "prompt_logprobs": 1}


def prompts() -> list[list[int]]:
    """The last one begins as another does."""
    generator = torch.Generator().manual_seed(2)
    found = [torch.randint(tokens.FIRST, VOCABULARY, (length,), generator=generator).tolist() for length in (3, 70, 1, 25, 130)]
    return [*found, found[1][:40] + found[3]]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def told(result):
    return result.token_ids, result.logprobs, result.top_logprobs, result.prompt_logprobs


@pytest.mark.parametrize(
    "case, dtype, cache, kernels, count",
    [
        ("llama", "fp32", "paged", True, 1),
        ("llama", "fp32", "paged", False, 2),
        ("llama", "fp32", "contiguous", False, 1),
        ("llama", "fp16", "paged", False, 1),
        ("mixtral", "fp32", "paged", False, 1),
        ("qwen3_moe", "bf16", "paged", True, 1),
        ("gemma2", "fp32", "paged", False, 1),  # windows, and bounded scores
        ("gpt2", "fp32", {"name": "quantized"}, False, 1),
        ("mistral", "fp32", {"name": "sliding_window", "window": 32, "sinks": 3}, False, 1),
    ],
    ids=str,
)
def test_company_changes_nothing(small_model, threads, monkeypatch, case, dtype, cache, kernels, count):
    """Alone; beside others, with known beginnings the second time; in pieces; after making room for others; with guesses."""
    threads(count)
    if not kernels:
        monkeypatch.setattr(in_blocks, "available", lambda *_: False)
    directory, asked = small_model(case), prompts() if count == 1 else prompts()[:4]  # threads that wait for each other take long
    alone = fw.LLM(directory, dtype=dtype, kv_cache=cache, max_sequences=1, **BASE)
    expected = [told(alone.generate([prompt], **SETTINGS)[0]) for prompt in asked]
    ways = [{}, {"step_tokens": 7, "max_sequences": 4, "speculate": 2}]
    if case == "llama":
        ways.append({"kv_budget": f"{int(alone.engine.reads.token_bytes * 144)}B"})
    for options in ways:
        llm = fw.LLM(directory, dtype=dtype, kv_cache=cache, **BASE, **options)
        for _ in range(2):
            assert [told(result) for result in llm.generate(asked, **SETTINGS)] == expected, options
        assert bool(llm.engine.scheduler.preemptions) == ("kv_budget" in options)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_adapters_of_odd_ranks(directory, tmp_path, dtype):
    config = LoraConfig(r=5, lora_alpha=7, target_modules="all-linear", init_lora_weights=False, rank_pattern={"k_proj": 3})
    torch.manual_seed(0)
    get_peft_model(AutoModelForCausalLM.from_pretrained(directory), config).save_pretrained(tmp_path)
    llm = fw.LLM(directory, dtype=dtype, **BASE)
    llm.load_adapter("it", tmp_path)
    names = [name for _ in prompts() for name in (None, "it")]
    asked = [prompt for prompt in prompts() for _ in range(2)]
    together = llm.generate(asked, adapter=names, **SETTINGS)
    alone = [llm.generate([prompt], adapter=name, **SETTINGS)[0] for prompt, name in zip(asked, names, strict=True)]
    assert [told(result) for result in together] == [told(result) for result in alone]
    assert together[0].logprobs != together[1].logprobs


@pytest.mark.parametrize("case", ["llama", "gemma2", "qwen3_moe"])
def test_tokens_are_transformers(small_model, case):
    theirs = AutoModelForCausalLM.from_pretrained(small_model(case))
    llm = fw.LLM(small_model(case), dtype="fp32", kv_cache="contiguous", **BASE)
    for prompt, result in zip(prompts(), llm.generate(prompts(), max_tokens=12, temperature=0, ignore_eos=True), strict=True):
        out = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert result.token_ids == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("window, sinks, softcap", [(None, 0, None), (50, 0, None), (50, 3, 5.0), (200, 0, None)])
def test_attention_in_tiles(window, sinks, softcap):
    """Of keys that are more than a tile, to what attention at once gives, and of each query as of that one alone."""
    generator = torch.Generator().manual_seed(1)
    q_QNH, k_LKH, v_LKH = (torch.randn(n, heads, 10, generator=generator) for n, heads in ((30, 6), (300, 2), (300, 2)))
    how = {"window": window, "scale": 0.3, "softcap": softcap, "sinks": sinks}
    found = attend_in_tiles(q_QNH, 270, k_LKH.__getitem__, v_LKH.__getitem__, **how)
    torch.testing.assert_close(found, attend(q_QNH, k_LKH, v_LKH, **how), atol=1e-5, rtol=1e-5)
    for row in range(30):
        keys, values = k_LKH[: 271 + row], v_LKH[: 271 + row]
        assert torch.equal(attend_in_tiles(q_QNH[row : row + 1], 270 + row, keys.__getitem__, values.__getitem__, **how)[0], found[row])


def test_embeddings_and_hidden_states_are_of_every_token(directory):
    """Of prompts that are several tiles."""
    plain, tiled = (fw.LLM(directory, dtype="fp32", max_context=250, batch_invariant=on) for on in (False, True))
    for pooling in ("mean", "last"):
        for one, other in zip(plain.embed(prompts(), pooling=pooling), tiled.embed(prompts(), pooling=pooling), strict=True):
            assert one == pytest.approx(other, abs=1e-5)


def test_what_cannot_be_promised(small_model, directory, monkeypatch):
    with pytest.raises(UserError, match=r"inference\.batch_invariant: what a token gets .* since model\.rope_scaling of type dynamic"):
        fw.LLM(small_model("llama-dynamic"), batch_invariant=True)
    with monkeypatch.context() as patched, pytest.raises(UserError, match=r"inference\.batch_invariant: the kv_cache that is chosen"):
        patched.setattr(Paged, "batch_invariant", False)
        fw.LLM(directory, batch_invariant=True)
    with pytest.raises(UserError, match=r"inference\.batch_invariant: 2 ranks add up parts of sums.* set inference\.tensor: 1"):
        fw.LLM(directory, batch_invariant=True, tensor=2)
    norm = RMSNorm.forward
    monkeypatch.setattr(RMSNorm, "forward", lambda self, x: norm(self, x) * (1 + 1e-6 * torch.arange(x.shape[1])[:, None] % 3))
    with pytest.raises(UserError, match=r"inference\.batch_invariant: on this machine torch computes a row otherwise at another place"):
        fw.LLM(directory, dtype="fp32", batch_invariant=True)


def test_torch_gets_its_threads_back(threads):
    threads(2)
    with fixed_rows(16, torch.device("cpu")):
        assert (torch.get_num_threads(), rows_of_products()) == (1, 16)
    assert (torch.get_num_threads(), rows_of_products()) == (2, None)
