"""Guesses change nothing but how many steps it takes."""

from __future__ import annotations

import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import fw
import tokens
from fw.errors import UserError
from fw.inference.speculation import Lookup

PROMPTS = ["abcabcabcabc", "one two one two one two", "x", "hello"]


def test_what_followed_the_same_tokens():
    lookup = Lookup()
    assert lookup.guess([1, 2, 3], 4) == []
    assert lookup.guess([1, 2, 3, 9, 1, 2], 4) == [3, 9, 1, 2], "after 1, 2 the last time"
    assert lookup.guess([1, 2, 3, 9, 1, 2, 7, 2, 3], 2) == [9, 1]
    assert lookup.guess([1, 2, 3, 9, 1, 2, 7, 2, 3, 5, 1, 2], 2) == [7, 2], "the latest one counts"
    assert Lookup().guess([4, 1, 2, 8, 5, 1, 2, 6, 4, 1, 2], 2) == [8, 5], "three the same are better than two"
    assert Lookup().guess([3, 3, 3, 3], 3) == [3, 3, 3], "round and round"
    assert Lookup().guess([9, 4, 5, 6, 4, 5], 5) == [6, 4, 5, 6, 4]


@pytest.mark.parametrize("cache", ["paged", "contiguous", {"name": "quantized"}])
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0, "ignore_eos": True},
        {"temperature": 1.2, "seed": 7, "n": 2},
        {"temperature": 0.3, "seed": 1, "logprobs": 2, "presence_penalty": 0.5, "stop": ["a", "qq"]},
        {"temperature": 0, "min_tokens": 5, "repetition_penalty": 1.1},
    ],
)
def test_answers_are_the_same(directory, cache, settings):
    options = {"dtype": "fp32" if cache == "contiguous" else "bf16", "kv_cache": cache, "max_sequences": 4}
    plain, guessing = (fw.LLM(directory, **options, speculate=speculate) for speculate in (0, 4))
    asked = {"max_tokens": 60, **settings}
    expected, found = plain.generate(PROMPTS, **asked), guessing.generate(PROMPTS, **asked)
    for one, other in zip(expected, found, strict=True):
        assert [each.token_ids for each in one.completions] == [each.token_ids for each in other.completions]
        assert [each.text for each in one.completions] == [each.text for each in other.completions]
        for left, right in zip(one.completions, other.completions, strict=True):
            assert left.logprobs == pytest.approx(right.logprobs, abs=1e-5)
            assert (left.finish_reason, left.stopped_by) == (right.finish_reason, right.stopped_by)
    assert plain.engine.guesses == 0
    assert not guessing.engine.scheduler.running


def test_repetition_takes_fewer_steps(directory):
    """An answer that repeats itself, as greedy ones of a model that has learnt nothing do."""
    steps = {}
    for speculate in (0, 4):
        llm = fw.LLM(directory, dtype="bf16", speculate=speculate)
        llm.engine.add("it", llm.encode("abc"), llm.sampling(max_tokens=120, temperature=0, ignore_eos=True))
        steps[speculate] = 0
        text = []
        while len(llm.engine):
            deltas, _ = llm.engine.step()
            text += [delta.token for delta in deltas]
            steps[speculate] += 1
        assert len(text) == 120
    assert steps[0] == 120 and steps[4] < 80
    assert llm.engine.right_guesses == 120 - steps[4] and llm.engine.guesses >= llm.engine.right_guesses


def test_what_cannot_be_guessed(directory):
    with pytest.raises(UserError, match=r"inference\.speculate: -1 is too small; the least is 0"):
        fw.LLM(directory, speculate=-1)


DRAFTED = [
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 1.2, "seed": 7, "n": 2},
    {"temperature": 0.3, "seed": 1, "logprobs": 2, "presence_penalty": 0.5, "stop": ["a", "qq"]},
]


@pytest.fixture(scope="module")
def other(directory, tmp_path_factory):
    """A smaller model with the same tokens, whose weights are its own."""
    place = tmp_path_factory.mktemp("draft")
    shutil.copytree(directory, place, dirs_exist_ok=True)
    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(directory)
    config.num_hidden_layers = 1
    AutoModelForCausalLM.from_config(config).save_pretrained(place)
    return place


def same_answers(one, other) -> None:
    for left, right in zip(one, other, strict=True):
        assert [each.token_ids for each in left.completions] == [each.token_ids for each in right.completions]
        assert [each.text for each in left.completions] == [each.text for each in right.completions]


@pytest.mark.parametrize(
    "cache, settings",
    [
        *(("paged", settings) for settings in DRAFTED),
        ("contiguous", DRAFTED[0]),
        ({"name": "quantized"}, DRAFTED[1]),
        *(({"name": "sliding_window", "block_size": 4, "window": 12}, settings) for settings in DRAFTED),
    ],
)
def test_answers_with_a_draft_are_the_same(directory, other, cache, settings):
    options = {"dtype": "fp32" if cache == "contiguous" else "bf16", "kv_cache": cache, "max_sequences": 4}
    plain = fw.LLM(directory, **options)
    asked = {"max_tokens": 50, **settings}
    expected = plain.generate(PROMPTS, **asked)
    for draft in (other, directory):
        guessing = fw.LLM(directory, **options, speculate=3, draft=str(draft), step_tokens=24)
        same_answers(guessing.generate(PROMPTS, **asked), expected)
        assert guessing.engine.guesses > 0
        assert guessing.engine.guesser.cache.live_bytes == 0 or cache != "contiguous", (
            "what has ended leaves nothing but what may be asked again"
        )


def test_a_draft_that_is_the_model_is_always_right(directory):
    """Four tokens a step, of a greedy answer; its own steps are recorded, too."""
    llm = fw.LLM(directory, dtype="bf16", speculate=3, draft=str(directory))
    llm.engine.add("it", llm.encode("hello"), llm.sampling(max_tokens=101, temperature=0, ignore_eos=True))
    steps = 0
    while len(llm.engine):
        llm.engine.step()
        steps += 1
    assert steps == 1 + 25
    assert llm.engine.guesses == llm.engine.right_guesses == 75


@pytest.mark.parametrize("cache", ["paged", "contiguous"])
def test_a_draft_without_the_models_last_rows(directory, other, tmp_path, cache):
    """Which no token of the tokenizer has; a prompt and a bias may, and nobody guesses then."""
    places = [tmp_path / name for name in ("model", "draft")]
    for place, source in zip(places, (directory, other), strict=True):
        shutil.copytree(source, place)
        tokens.save(place, 120)
    config = AutoConfig.from_pretrained(other)
    config.vocab_size = 120
    AutoModelForCausalLM.from_config(config).save_pretrained(places[1])
    plain = fw.LLM(places[0], dtype="bf16", kv_cache=cache)
    llm = fw.LLM(places[0], dtype="bf16", kv_cache=cache, speculate=3, draft=str(places[1]), step_tokens=24, max_sequences=4)
    asked = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
    prompts = [[1, 120, *range(5, 40)], [1, *range(5, 60), 130], [1, 8, 9], [1, 4, 5, 6]]
    same_answers(llm.generate(prompts, **asked), plain.generate(prompts, **asked))
    assert llm.engine.guesses > 0, "for those that have no such token"
    before = llm.engine.guesses
    biased = llm.generate(prompts[2], **asked, logit_bias={125: 1000.0})
    same_answers(biased, plain.generate(prompts[2], **asked, logit_bias={125: 1000.0}))
    assert biased[0].token_ids == [125] * 20 and llm.engine.guesses == before
    assert not llm.engine.guesser._strange and not llm.engine.guesser._written, "nothing is left of them"


def test_a_long_prompt_is_caught_up_with(directory):
    """The draft computes no more at once than a step of the model does."""
    prompt = "the quick brown fox " * 8
    plain = fw.LLM(directory, dtype="bf16")
    llm = fw.LLM(directory, dtype="bf16", speculate=3, draft=str(directory), step_tokens=16, max_sequences=2)
    most = []
    run = llm.engine.guesser.runner.run
    llm.engine.guesser.runner.run = lambda pieces: most.append(sum(p.stretch.length for p in pieces)) or run(pieces)
    asked = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
    same_answers(llm.generate([prompt, "x", prompt + "y"], **asked), plain.generate([prompt, "x", prompt + "y"], **asked))
    assert max(most) <= 16 and llm.engine.right_guesses > 60


def test_little_room_for_guesses(directory, other):
    """Where the draft has none, nobody guesses; where the model has none, somebody makes it, as ever."""
    token_bytes = [sum(2 * s.heads * s.head_dim for s in fw.load_model(place).kv_shapes) * 2 for place in (directory, other)]
    plain = fw.LLM(directory, dtype="bf16")
    llm = fw.LLM(
        directory, dtype="bf16", speculate=4, draft=str(other), max_context=72, kv_budget=f"{sum(token_bytes) * 112}B", max_sequences=4
    )
    asked = {"max_tokens": 45, "temperature": 0, "ignore_eos": True}
    same_answers(llm.generate(PROMPTS, **asked), plain.generate(PROMPTS, **asked))
    assert llm.engine.scheduler.preemptions and llm.engine.guesses
    for cache in (llm.engine.scheduler.cache, llm.engine.guesser.cache):
        cache.pool.check()
        assert not cache.pool.tables


def test_a_draft_with_other_tokens(directory, tmp_path):
    with pytest.raises(UserError, match=r"inference\.draft: a draft guesses inference\.speculate tokens, which is 0"):
        fw.LLM(directory, draft=str(directory))
    with pytest.raises(UserError, match=r"inference\.draft: .*nowhere"):
        fw.LLM(directory, draft=str(tmp_path / "nowhere"), speculate=2)
    shutil.copytree(directory, tmp_path / "other")
    tokens.save(tmp_path / "other", 99)
    with pytest.raises(UserError, match="has other tokens than the model"):
        fw.LLM(directory, draft=str(tmp_path / "other"), speculate=2)
