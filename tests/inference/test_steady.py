"""Steps that are recorded and made again: the same answers, to the bit, as Python gives; and what is left to Python."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import fw
import tokens
from fw.inference.cached import Piece
from fw.inference.steady import Way, sizes_on_gpu
from fw.kernels import linear
from fw.kernels.build import library
from fw.kinds.kv_cache import Stretch
from fw_plugins.kv_cache import in_blocks
from models.architectures import CASES, VOCABULARY

pytestmark = pytest.mark.skipif(not linear.available(), reason="no compiler")
NEW = 12
CACHES = {
    "paged": {"name": "paged", "block_size": 4},
    "int8": {"name": "quantized", "block_size": 4, "to": "int8"},
    "int4": {"name": "quantized", "block_size": 4, "to": "int4"},
    "window": {"name": "sliding_window", "block_size": 4, "window": 8, "sinks": 2},
}


def prompts(count: int, longest: int = 20) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randint(tokens.FIRST, VOCABULARY, (1 + (7 * n + 3) % longest,), generator=generator).tolist() for n in range(count)]


def answers(llm, count: int, **settings) -> list:
    longest = min(20, llm.engine.context - NEW)
    return llm.generate(prompts(count, longest), **{"temperature": 0, "max_tokens": NEW, "ignore_eos": True, "logprobs": 2, **settings})


def same(one, other) -> bool:
    """To the bit."""
    return [(r.token_ids, r.logprobs, r.top_logprobs) for r in one] == [(r.token_ids, r.logprobs, r.top_logprobs) for r in other]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_every_architecture(small_model, case, dtype):
    recorded, python = (fw.LLM(small_model(case), dtype=dtype, replay=on) for on in (True, False))
    steady = recorded.engine.runner.steady
    for count in (1, 3, 1, 5):
        assert same(answers(recorded, count), answers(python, count))
    assert steady.refused is None
    # Of each number of sequences, a step is Python's, one is recorded, and one compared with Python.
    assert steady.repeated >= 4 * (NEW - 1) - 3 * 3
    assert python.engine.runner.steady is None
    assert library().fw_thread_count() == torch.get_num_threads()


@pytest.mark.parametrize("weights", ["auto", "int8_weight_only", "w8a8"])
@pytest.mark.parametrize("cache", CACHES)
def test_every_cache_and_kind_of_weights(small_model, cache, weights):
    options = {"dtype": "bf16", "kv_cache": CACHES[cache], "weights": weights}
    recorded, python = (fw.LLM(small_model("llama"), replay=on, **options) for on in (True, False))
    for count in (1, 2, 4):
        assert same(answers(recorded, count, max_tokens=40), answers(python, count, max_tokens=40))
    assert recorded.engine.runner.steady.repeated > 100


@pytest.mark.parametrize(
    "quantization",
    [
        {"name": "w8a16", "group_size": 16},
        {"name": "w4a16", "group_size": 16, "symmetric": False},
        {"name": "nf4", "double_quantization": False, "block_size": 32},
        {"name": "nf4", "double_quantization": False},  # blocks that rows do not hold whole: weights are made of them each time
    ],
)
def test_codes(small_model, quantization):
    options = {"dtype": "bf16", "quantization": quantization}
    recorded, python = (fw.LLM(small_model("llama"), replay=on, **options) for on in (True, False))
    for count in (1, 3):
        assert same(answers(recorded, count), answers(python, count))
    assert recorded.engine.runner.steady.repeated >= 2 * (NEW - 1) - 6


def test_sequences_come_and_go_and_make_room(small_model):
    token_bytes = sum(2 * s.heads * s.head_dim for s in fw.load_model(small_model("llama")).kv_shapes) * 4
    options = {"dtype": "fp32", "kv_cache": CACHES["paged"], "max_context": 60, "kv_budget": f"{token_bytes * 100}B"}
    recorded, python = (fw.LLM(small_model("llama"), replay=on, **options) for on in (True, False))
    asked = prompts(12)
    for llm in (recorded, python):
        for number, prompt in enumerate(asked):
            sampling = llm.sampling(temperature=0.8, seed=number, max_tokens=5 + 3 * number, ignore_eos=True, logprobs=0)
            llm.engine.add(str(number), prompt, sampling)
    found = []
    for llm in (recorded, python):
        results = {}
        while len(llm.engine):
            for result in llm.engine.step()[1]:
                results[result.key] = (result.token_ids, result.logprobs)
        found.append(results)
        assert llm.engine.scheduler.preemptions
    assert found[0] == found[1] and len(found[0]) == 12
    assert recorded.engine.runner.steady.repeated > 20


@pytest.mark.parametrize("cache", CACHES)
def test_guesses_are_recorded_too(small_model, cache):
    options = {"dtype": "bf16", "kv_cache": CACHES[cache], "speculate": 3, "draft": str(small_model("llama"))}
    recorded, python = (fw.LLM(small_model("llama"), replay=on, **options) for on in (True, False))
    for count in (1, 2):
        assert same(answers(recorded, count, max_tokens=60), answers(python, count, max_tokens=60))
    assert recorded.engine.runner.steady.repeated > 10
    assert recorded.engine.guesser.runner.steady.repeated > 20 and python.engine.guesser.runner.steady is None


def test_hooks_are_called(small_model):
    llm = fw.LLM(small_model("llama"), dtype="bf16")
    answers(llm, 1)
    steady = llm.engine.runner.steady
    before = steady.repeated
    assert before
    seen = []
    handle = llm.model.blocks[0].register_forward_hook(lambda *_: seen.append(1))
    answers(llm, 1)
    assert len(seen) == NEW and steady.repeated == before
    handle.remove()
    answers(llm, 1)
    assert len(seen) == NEW and steady.repeated == before + NEW - 1, "what was recorded is still there"


class Counts(nn.Module):
    """Gives something else each time, for reasons of its own."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.times = norm, 0

    def forward(self, x):
        self.times += 1
        return self.norm(x) * (1 + self.times / 7)


def test_a_model_that_differs_each_time_is_left_to_python(small_model):
    found = []
    for replay in (True, False):
        llm = fw.LLM(small_model("llama"), dtype="fp32", replay=replay)
        llm.model.norm = Counts(llm.model.norm)
        if replay:
            with pytest.warns(UserWarning, match="Llama computes otherwise each time"):
                found.append(answers(llm, 1))
            assert llm.engine.runner.steady.repeated == 0 and "otherwise" in llm.engine.runner.steady.refused
        else:
            found.append(answers(llm, 1))
    # One step was computed once more than was asked for, to compare.
    assert [r.token_ids[:3] for r in found[0]] == [r.token_ids[:3] for r in found[1]]


class Draws(Counts):
    def forward(self, x):
        return self.norm(x) + 0 * torch.rand_like(x)


class Looks(Counts):
    def forward(self, x):
        return self.norm(x) * (2 if x.sum().item() > 1e9 else 1)


class Knows(Counts):
    def forward(self, x):
        return self.norm(x) * torch.tensor(float(self.times == 0))


class Keeps(Counts):
    def forward(self, x):
        self.times = x if isinstance(self.times, int) or self.times.shape != x.shape else self.times
        return self.norm(x) + 0 * self.times


@pytest.mark.parametrize(
    "kind, why", [(Draws, "rand.*may differ"), (Looks, "may differ"), (Knows, "may differ|neither"), (Keeps, "neither among its inputs")]
)
def test_what_cannot_be_recorded(small_model, kind, why):
    expected = answers(fw.LLM(small_model("llama"), dtype="bf16", replay=False), 2)
    llm = fw.LLM(small_model("llama"), dtype="bf16")
    llm.model.norm = kind(llm.model.norm)
    assert same(answers(llm, 2), expected)
    steady = llm.engine.runner.steady
    assert steady.repeated == 0 and re.search(why, steady.refused)


def test_caches_whose_memory_moves(small_model, monkeypatch):
    for cache, operators in ((CACHES["paged"], True), ({"name": "contiguous"}, False)):
        with monkeypatch.context() as patched:
            if operators:
                patched.setattr(in_blocks, "available", lambda *_: False)
            llm = fw.LLM(small_model("llama"), dtype="fp32", kv_cache=cache)
            assert same(answers(llm, 2), answers(fw.LLM(small_model("llama"), dtype="fp32", kv_cache=cache, replay=False), 2))
            assert llm.engine.runner.steady.refused.endswith("has no places that stay")


def test_warm_before_the_first_request(small_model):
    """All is recorded and compared, and nothing stays in the cache."""
    assert sizes_on_gpu(1) == [1] and sizes_on_gpu(13) == [1, 2, 4, 8, 16] and sizes_on_gpu(64)[-3:] == [48, 56, 64]
    warm, cold = (fw.LLM(small_model("llama"), dtype="fp32", kv_cache=CACHES["paged"]) for _ in range(2))
    warm.engine.warm_up([1, 3])
    steady, cache = warm.engine.runner.steady, warm.engine.scheduler.cache
    assert len(steady._known) == 2 and all(step.proven for step in steady._known.values())
    assert cache.live_bytes == 0 and not cache.pool.tables and warm.engine.scheduler.prompt_tokens == 0
    assert same(answers(warm, 3), answers(cold, 3))
    assert steady.repeated >= NEW - 1 > cold.engine.runner.steady.repeated


def test_what_there_is_no_room_for_is_not_warm(small_model):
    llm = fw.LLM(small_model("llama"), dtype="fp32", kv_cache=CACHES["paged"], max_context=8, kv_budget="8KiB")
    llm.engine.warm_up([200, 1])
    assert len(llm.engine.runner.steady._known) == 1 and not llm.engine.scheduler.cache.pool.tables


def test_a_rank_that_has_no_recording_computes_as_often_as_the_first_one(small_model):
    """Which has one, and by which way."""
    llm = fw.LLM(small_model("llama"), dtype="fp32", kv_cache=CACHES["paged"])
    runner, cache, calls = llm.engine.runner, llm.engine.scheduler.cache, []
    llm.model.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    assert cache.reserve(0, 0, 3)
    piece = Piece(Stretch(0, 0, 3), [5, 6, 7], range(2, 3))
    (expected,) = runner.run([piece])
    runner.steady.refused = "cannot"
    for way, times in ((Way.PYTHON, 1), (Way.RECORDED, 1), (Way.COMPARED, 2), (Way.REPEATED, 1)):
        calls.clear()
        (found,) = runner.run([piece], way=way)
        assert torch.equal(found, expected) and len(calls) == times, way
