"""Answers as they come, by :meth:`fw.LLM.stream`: beside each other, left in the middle, and those that do not come so."""

from __future__ import annotations

import asyncio

import pytest

import fw
from fw.errors import UserError
from fw.evaluating.scoring import Continuation, scores
from fw.inference.results import Result

PROMPT = "the quick brown fox"


def test_answers_as_they_come(llm, alone):
    whole = alone(llm, PROMPT, max_tokens=20)
    deltas = list(llm.stream(PROMPT, temperature=0, max_tokens=20))
    assert [delta.token for delta in deltas] == whole.token_ids
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [delta.logprob for delta in deltas] == pytest.approx(whole.logprobs, abs=1e-5)
    assert [delta.finish_reason for delta in deltas] == [None] * 19 + ["length"]
    stream = llm.stream(PROMPT, temperature=0, max_tokens=20)
    next(stream)
    stream.close()
    assert not len(llm.engine), "who stops listening ends it"


def test_answers_as_they_come_beside_others(llm, alone):
    """Streams in turns, and whatever else is asked between two of their tokens, on any of which the last of another may come."""
    prompts = [PROMPT, "abc", "hello"]
    lengths = [9, 30, 17]
    expected = [alone(llm, prompt, max_tokens=most).token_ids for prompt, most in zip(prompts, lengths, strict=True)]
    embedded = llm.embed("abc")
    (score,) = scores(llm, [Continuation([5, 6], [7])])
    streams = [llm.stream(prompt, temperature=0, max_tokens=most) for prompt, most in zip(prompts, lengths, strict=True)]
    found: list[list[int | None]] = [[], [], []]
    for turn in range(31):
        for stream, so_far in zip(streams, found, strict=True):
            if (delta := next(stream, None)) is not None:
                so_far.append(delta.token)
        if turn % 3 == 0:
            assert alone(llm, "abc", max_tokens=12).token_ids == expected[1][:12]
            assert llm.embed("abc") == [pytest.approx(embedded[0], abs=1e-5)]
            assert scores(llm, [Continuation([5, 6], [7])])[0].logprob == pytest.approx(score.logprob, abs=1e-5)
    assert found == expected and not len(llm.engine)


def test_a_stream_whose_result_somebody_else_took_says_so(llm):
    stream = llm.stream(PROMPT, temperature=0, max_tokens=3)
    next(stream)
    while len(llm.engine):
        llm.engine.step()
    with pytest.raises(RuntimeError, match=r"step by LLM\.step"):
        list(stream)


def test_a_stream_that_is_left_amid_a_step_ends_with_it(llm, monkeypatch, alone):
    """As a generator that the garbage collector finds there does."""
    expected = alone(llm, "abc").token_ids
    left = llm.stream(PROMPT, temperature=0, max_tokens=30)
    next(left)
    run, there = llm.engine.runner.run, []

    def leaving(pieces, *others):
        left.close()
        there.append(len(llm.engine))
        return run(pieces, *others)

    monkeypatch.setattr(llm.engine.runner, "run", leaving)
    assert alone(llm, "abc").token_ids == expected
    assert there == [2] + [1] * 11, "a step has its sequences to its end"
    assert not len(llm.engine) and not llm.engine.scheduler.running


def test_the_best_of_several_come_when_all_have_ended(directory):
    llm, settings = fw.LLM(directory, dtype="fp32"), {"n": 1, "best_of": 3, "temperature": 1.0, "seed": 1, "max_tokens": 6}
    (best,) = llm.generate(PROMPT, **settings)
    with pytest.raises(UserError, match="best_of: the best 1 of 3 answers are known when all have ended; generate gives them"):
        next(llm.stream(PROMPT, **settings))
    assert not len(llm.engine)

    async def last():
        return [each async for each in llm.astream(PROMPT, **settings)]

    try:
        (found,) = asyncio.run(last())
    finally:
        llm.close()
    assert isinstance(found, Result) and found.token_ids == best.token_ids
