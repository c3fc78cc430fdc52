"""Many requests at once by asyncio, against the same ones asked one after another."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

import fw
from fw.errors import UserError
from fw.inference.background import Background
from fw.inference.llm import LLM
from fw.inference.results import Delta, Result

PROMPTS = ["abc", "hello there", "x", "some longer words", "q"] * 4
GREEDY = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def llm(directory):
    made = fw.LLM(directory, dtype="fp32", max_sequences=6, step_tokens=20)
    yield made
    made.close()


def test_answers_as_they_come(llm):
    expected = llm.generate(PROMPTS, **GREEDY)

    async def one(prompt: str) -> tuple[list[Delta], Result]:
        found = [each async for each in llm.astream(prompt, **GREEDY)]
        assert isinstance(found[-1], Result)
        return found[:-1], found[-1]

    async def all_of_them():
        return await asyncio.gather(*(one(prompt) for prompt in PROMPTS))

    for (deltas, result), right in zip(asyncio.run(all_of_them()), expected, strict=True):
        assert result.token_ids == right.token_ids == [delta.token for delta in deltas]
        assert "".join(delta.text for delta in deltas) == right.text == result.text
    assert asyncio.run(llm.agenerate("abc", **GREEDY)).token_ids == expected[0].token_ids, "in another loop, too"
    assert not len(llm.engine) and not llm.engine.scheduler.cache.pool.tables
    with pytest.raises(UserError, match=r"astream and agenerate have the model; use these, or close\(\) first"):
        llm.generate("abc")
    llm.close()
    assert llm.generate("abc", **GREEDY)[0].token_ids == expected[0].token_ids
    assert not [thread for thread in threading.enumerate() if thread.name == "fw engine"]


def test_not_beside_a_stream_that_makes_steps_of_its_own(llm):
    stream = llm.stream("abc", **GREEDY)
    next(stream)
    with pytest.raises(UserError, match="a stream is open, which makes steps of its own"):
        asyncio.run(llm.agenerate("abc"))
    stream.close()
    assert asyncio.run(llm.agenerate("abc", **GREEDY)).finish_reason == "length"


def test_who_stops_listening_ends_it(llm):
    async def some() -> None:
        heard = 0
        async for _ in (stream := llm.astream("abc", max_tokens=200, temperature=0, ignore_eos=True)):
            heard += 1
            if heard == 3:
                break
        await stream.aclose()
        long = asyncio.create_task(llm.agenerate("hello", max_tokens=200, temperature=0, ignore_eos=True))
        await llm.agenerate("x", max_tokens=2)
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        # What is asked after an abort is done after it.
        left = await asyncio.wrap_future(llm._background.call(lambda: (len(llm.engine), dict(llm.engine.scheduler.cache.pool.tables))))
        assert left == (0, {})

    asyncio.run(some())


def test_what_goes_wrong_is_told_to_whom_it_concerns(llm, monkeypatch):
    async def some() -> None:
        with pytest.raises(UserError, match="the prompt has no tokens"):
            await llm.agenerate([])
        with pytest.raises(UserError, match="there is no adapter 'none'"):
            await llm.agenerate("a", adapter="none")
        with pytest.raises(UserError, match="temperature: -1 is not at least 0"):
            await llm.agenerate("a", temperature=-1)
        fine = await llm.agenerate("abc", **GREEDY)
        step = llm.engine.runner.run

        def broken(pieces):
            raise RuntimeError("out of luck")

        monkeypatch.setattr(llm.engine.runner, "run", broken)
        found = await asyncio.gather(*(llm.agenerate(prompt) for prompt in ("a", "b")), return_exceptions=True)
        assert [str(error) for error in found] == ["out of luck"] * 2
        monkeypatch.setattr(llm.engine.runner, "run", step)
        assert (await llm.agenerate("abc", **GREEDY)).token_ids == fine.token_ids, "the next ones are answered"

    asyncio.run(some())


def test_closed_in_the_middle(directory):
    llm: LLM = fw.LLM(directory)

    async def some() -> None:
        waiting = asyncio.create_task(llm.agenerate("abc", max_tokens=200, ignore_eos=True))
        await llm.agenerate("x", max_tokens=1)
        await asyncio.to_thread(llm.close)
        with pytest.raises(RuntimeError, match="closed before the answer was whole"):
            await waiting

    asyncio.run(some())


def test_a_model_that_nobody_has_is_gone(directory):
    made = fw.LLM(directory, dtype="fp32")
    asyncio.run(made.agenerate("abc", **GREEDY))
    thread = next(thread for thread in threading.enumerate() if thread.name == "fw engine")
    model = weakref.ref(made.model)
    del made
    gc.collect()
    thread.join(timeout=60)
    del thread
    gc.collect()
    assert model() is None


def test_who_comes_after_the_end_is_told_so(llm):
    told = []
    background = Background(llm.engine)
    background.close()
    background.add("late", [5], llm.sampling(), told.append)
    assert "the engine was closed" in str(told[0]) and not len(llm.engine)
