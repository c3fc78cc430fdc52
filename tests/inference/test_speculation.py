"""Guesses change nothing but how many steps it takes."""

from __future__ import annotations

import pytest

import fw
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
