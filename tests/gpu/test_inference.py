"""The engine on a GPU, against the same model on the host."""

from __future__ import annotations

import pytest
import torch

import fw
import tokens
from fw.inference.steady import sizes_on_gpu
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


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3", "qwen3", "mistral", "gpt2", "mixtral"])
def test_steps_are_graphs(tmp_path, architecture):
    """But those that wait for the GPU; and whether or not, tokens are the host's."""
    save(architecture, tmp_path)
    tokens.save(tmp_path, VOCABULARY)
    expected = fw.LLM(tmp_path, dtype="fp32", device="cpu").generate(PROMPTS, **GREEDY)
    llm = fw.LLM(tmp_path, dtype="fp32", device="cuda", kv_budget="64MiB")
    for result, right in zip(llm.generate(PROMPTS, **GREEDY), expected, strict=True):
        assert result.token_ids == right.token_ids
    steady = llm.engine.runner.steady
    assert (steady.repeated >= 10 and steady.refused is None) or (architecture == "mixtral" and "graph" in steady.refused)


@pytest.mark.parametrize("cache", [{"name": "sliding_window", "window": 16, "sinks": 4}, {"name": "quantized", "to": "int8"}])
def test_other_caches_in_graphs(directory, cache):
    settings = {**GREEDY, "max_tokens": 60}
    on_host, on_gpu = (fw.LLM(directory, dtype="fp32", device=device, kv_cache=cache, kv_budget="64MiB") for device in ("cpu", "cuda"))
    for result, right in zip(on_gpu.generate(PROMPTS, **settings), on_host.generate(PROMPTS, **settings), strict=True):
        assert result.logprobs[:5] == pytest.approx(right.logprobs[:5], abs=0.02)
        if cache["name"] == "sliding_window":
            assert result.token_ids == right.token_ids
    assert on_gpu.engine.runner.steady.repeated >= 40


def test_as_many_at_once_as_come(directory):
    """Recordings of 8 and 16 serve 1 to 13 sequences, of which some end before others."""
    llm, python = (fw.LLM(directory, dtype="fp32", device="cuda", kv_budget="64MiB", replay=replay) for replay in (True, False))
    found, expected = [], []
    for one, into in ((llm, found), (python, expected)):
        for n in range(13):
            one.engine.add(str(n), ONES[n % 5][: 3 * n + 1], one.sampling(temperature=0, max_tokens=5 + 4 * n, ignore_eos=True))
        while len(one.engine):
            into += [(result.key, result.completions[0].token_ids) for result in one.engine.step()[1]]
    assert found == expected and python.engine.runner.steady is None
    assert llm.engine.runner.steady.repeated > 30 and len(llm.engine.runner.steady._known) <= 5


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.95, "top_k": 50}], ids=str)
def test_steps_begin_before_tokens_are_known(directory, settings, replay):
    """Of sequences that end one after another, some by a token that only the device knows when the next step begins."""
    found = {}
    for overlap in (True, False):
        llm = fw.LLM(directory, dtype="fp32", device="cuda", kv_budget="64MiB", replay=replay, overlap=overlap)
        early, run = [], llm.engine.runner.run
        llm.engine.runner.run = lambda pieces, tokens_T=None, early=early, run=run: (
            early.append(tokens_T is not None),
            run(pieces, tokens_T),
        )[1]
        for n in range(13):
            stops = {"stop_token_ids": list(range(n, VOCABULARY, 17))} if n % 3 == 0 else {}
            sampling = llm.sampling(max_tokens=5 + 4 * n, ignore_eos=True, seed=n, **settings, **stops)
            llm.engine.add(str(n), ONES[n % 5][: 3 * n + 1], sampling)
        found[overlap] = {}
        while len(llm.engine):
            found[overlap] |= {result.key: result.completions[0].token_ids for result in llm.engine.step()[1]}
        assert (sum(early) > 30) == overlap
    assert found[True] == found[False]


def test_kernels_are_compiled_for_a_model_and_not_for_each_step(directory):
    """Of prompts of all lengths, and any number of sequences."""
    from fw.kernels import triton_attention, triton_elementwise

    kernels = [
        triton_attention.attend,
        triton_attention.put_together,
        *(triton_elementwise.__dict__[name] for name in ("keep", "rotate", "rms_norm")),
    ]

    def compiled() -> list[int]:
        return [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels]

    others = compiled()  # of what ran before in this process
    llm = fw.LLM(directory, dtype="bf16", device="cuda", kv_budget="64MiB")
    llm.generate([ONES[0], *ONES[:2], *(ONES[n % 5][:3] for n in range(40))], **GREEDY)
    llm.generate([ONES[0]], **GREEDY)
    before = compiled()
    for count in (1, 2, 3, 5, 9, 14, 23, 40):
        llm.generate([ONES[n % 5][: 1 + (7 * n + count) % 40] for n in range(count)], **{**GREEDY, "max_tokens": 1 + count % 7})
    assert compiled() == before and sum(before[:2]) - sum(others[:2]) <= 4


def test_what_is_warm_has_nothing_left_to_record(directory):
    llm = fw.LLM(directory, dtype="fp32", device="cuda", kv_budget="64MiB", max_sequences=13)
    llm.engine.warm_up(sizes_on_gpu(13))
    steady = llm.engine.runner.steady
    assert len(steady._known) == 5 and all(step.proven for step in steady._known.values())
    expected = fw.LLM(directory, dtype="fp32", device="cpu").generate(PROMPTS, **GREEDY)
    assert [r.token_ids for r in llm.generate(PROMPTS, **GREEDY)] == [r.token_ids for r in expected]
    assert len(steady._known) == 5 and steady.repeated == GREEDY["max_tokens"] - 1


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
