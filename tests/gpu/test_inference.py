"""The engine on a GPU, against the same model on the host."""

from __future__ import annotations

import pytest
import torch

import fw
import tokens
from models.architectures import VOCABULARY, save

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GREEDY = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
ONES = torch.randint(tokens.FIRST, VOCABULARY, (5, 40), generator=torch.Generator().manual_seed(0)).tolist()
PROMPTS = [prompt[: 8 * n + 1] for n, prompt in enumerate(ONES)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    save("llama", place)
    tokens.save(place, VOCABULARY)
    return place


@pytest.mark.parametrize("cache", ["paged", "contiguous"])
@pytest.mark.parametrize("options", [{}, {"step_tokens": 16, "max_sequences": 3}, {"speculate": 3}])
def test_tokens_are_those_of_the_host(directory, cache, options):
    expected = fw.LLM(directory, dtype="fp32", device="cpu").generate(PROMPTS, **GREEDY)
    llm = fw.LLM(directory, dtype="fp32", device="cuda", kv_cache=cache, kv_budget="64MiB", **options)
    for result, right in zip(llm.generate(PROMPTS, **GREEDY), expected, strict=True):
        assert result.token_ids == right.token_ids
        assert result.logprobs == pytest.approx(right.logprobs, abs=1e-3)


@pytest.mark.parametrize("to", ["int8", "int4", "fp8"])
def test_fewer_bits(directory, to):
    if to == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8")
    whole, few = (
        fw.LLM(directory, dtype="bf16", device="cuda", kv_cache=cache, kv_budget="64MiB")
        for cache in ("paged", {"name": "quantized", "to": to})
    )
    settings = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    for one, other in zip(whole.generate(PROMPTS[1:], **settings), few.generate(PROMPTS[1:], **settings), strict=True):
        off = [abs(a - b) for a, b in zip(one.prompt_logprobs, other.prompt_logprobs, strict=True)]
        assert sum(off) / len(off) < 0.1
    assert few.engine.reads.token_bytes < 0.7 * whole.engine.reads.token_bytes


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_two_gpus(directory):
    expected = fw.LLM(directory, dtype="fp32", device="cpu").generate(PROMPTS, **GREEDY)
    llm = fw.LLM(directory, dtype="fp32", device="cuda", kv_budget="64MiB", tensor=2)
    try:
        for result, right in zip(llm.generate(PROMPTS, **GREEDY), expected, strict=True):
            assert result.token_ids == right.token_ids
            assert result.logprobs == pytest.approx(right.logprobs, abs=1e-3)
    finally:
        llm.close()
