"""Requests of more texts than are computed at once: taken as a whole or not at all, whatever happens between two parts."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from fw.config import ServeSection
from fw.inference.options import Sampling
from fw.inference.results import Result
from fw.server.api import Api
from fw.server.engines import Engines
from fw.server.errors import ApiError
from fw.server.messages import Add, Hold, Release
from fw.server.others import begin_embeddings
from fw.server.schemas import EmbeddingRequest

TEXTS = [[5], [6], [7], [8], [9]]


class Engine:
    """What the server sees of one, of two sequences at once, which answers when it is told to."""

    def __init__(self):
        self.loaded = SimpleNamespace(max_sequences=2, context=64, vocab_size=300, shows_hidden_states=True)
        self.there, self.said = {}, []

    @property
    def sequences(self):
        return len(self.there)

    def ahead(self, priority):
        return len(self.there)

    def begin(self, ticket, add):
        self.there[add.key] = ticket, add
        self.said.append(add)

    def leave(self, ticket):
        return self.there.pop(ticket.key, None) is not None

    def tell(self, message):
        self.said.append(message)

    def answer(self):
        """Whatever is no answer to generate: an embedding of three numbers."""
        for key, (ticket, add) in list(self.there.items()):
            if add.pooling is not None:
                del self.there[key]
                ticket.tell(Result(key, list(add.prompt), [], [], [], 0, [float(add.prompt[0]), 0.0, 0.0]))


def _served():
    """One, of which one request may wait, and how it is asked."""
    settings = SimpleNamespace(name="tiny", serve=ServeSection(max_queue=1))
    engines, engine = Engines(settings, SimpleNamespace(begin=0.0, children=[])), Engine()
    engines.condition, engines.tokenizer, engines._engines, engines.adapters = "ready", SimpleNamespace(), [engine], ["mine"]
    return Api(settings, engines), engines, engine


async def _answered(engine, task):
    while not task.done():
        engine.answer()
        await asyncio.sleep(0)
    return await task


def test_what_has_begun_goes_on_to_its_end():
    """With its adapter, though that is unloaded, the queue full and the server about to end."""

    async def run():
        api, engines, engine = _served()
        begun = await begin_embeddings(api, EmbeddingRequest(model="mine", input=TEXTS))
        task = asyncio.ensure_future(api.all_results(begun))
        engines.submit([[1]], Sampling())
        with pytest.raises(ApiError, match="queue is full"):
            engines.submit([[1]], Sampling())
        engines.adapters = []
        engines.drain()
        results = await _answered(engine, task)
        assert [result.prompt_token_ids for result in results] == TEXTS
        adds = [each for each in engine.said if isinstance(each, Add) and each.pooling]
        (hold,) = (each for each in engine.said if isinstance(each, Hold))
        assert [each.held for each in adds] == [None, None, *[hold.key] * 3] and hold.adapter == "mine"
        assert engine.said.index(hold) < engine.said.index(adds[2]) and engine.said[-1] == Release(hold.key)
        assert {each.adapter for each in adds} == {"mine"} and engine.sequences == 1

    asyncio.run(run())


def test_what_there_is_no_room_for_does_not_begin():
    async def run():
        api, engines, engine = _served()
        engines.submit([[1]] * 2, Sampling())
        before = list(engine.said)
        with pytest.raises(ApiError, match="queue is full") as found:
            await begin_embeddings(api, EmbeddingRequest(model="mine", input=TEXTS))
        assert found.value.status == 429
        with pytest.raises(ApiError, match="the prompt has 65 tokens"):
            await begin_embeddings(api, EmbeddingRequest(input=[*TEXTS, [5] * 65]))
        assert engine.said == before

    asyncio.run(run())


def test_who_does_not_wait_leaves_nothing():
    async def run():
        api, _, engine = _served()
        begun = await begin_embeddings(api, EmbeddingRequest(model="mine", input=TEXTS))
        task = asyncio.ensure_future(api.all_results(begun))
        engine.answer()
        while len(engine.said) < 5:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        begun.end()
        assert not engine.sequences and [type(each) for each in engine.said] == [Add, Add, Hold, Add, Add, Release]

    asyncio.run(run())


def test_dimensions_that_the_model_does_not_have():
    """Seen after the first part, and then before any."""

    async def run():
        api, _, engine = _served()
        many = EmbeddingRequest(input=TEXTS, dimensions=4)
        with pytest.raises(ApiError, match="4 are more than the model has, 3"):
            await _answered(engine, asyncio.ensure_future(api.all_results(await begin_embeddings(api, many))))
        assert len(engine.said) == 2
        with pytest.raises(ApiError, match="4 are more than the model has, 3"):
            await begin_embeddings(api, many)
        assert len(engine.said) == 2 and (await begin_embeddings(api, EmbeddingRequest(input=TEXTS, dimensions=3))).tickets

    asyncio.run(run())
