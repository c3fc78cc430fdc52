"""An engine whose model is arithmetic: keys are the tokens themselves, read back from the cache to say what comes next.

So an answer is right only if the cache holds, at every step, what the sequence has had.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import tokens
from fw.config import InferenceSection
from fw.inference.adapters import Adapter, Adapters
from fw.inference.cached import Piece
from fw.inference.engine import Engine, Reads
from fw.inference.options import Sampling
from fw.inference.results import Result
from fw.inference.scheduler import Scheduler
from fw.kinds.kv_cache import KVNeeds
from fw.kinds.model import KVShape
from fw_plugins.kv_cache.blocks import BlockPool
from fw_plugins.kv_cache.in_blocks import CacheInBlocks
from fw_plugins.kv_cache.keeping import Plain

VOCABULARY = 40
END = 2
SIZE = 4
CONTEXT = 48
ADAPTERS = ("first", "second")
_TOKENIZER = tokens.characters(VOCABULARY)


def following(sequence: Sequence[int]) -> int:
    """What the model says comes next, of all that was there; at times the end."""
    value = 7
    for token in sequence:
        value = (value * 31 + token) % 1_000_003
    return END if value % 11 == 0 else 3 + value % (VOCABULARY - 3)


def offset(adapter: Adapter | None) -> int:
    """Which an adapter adds to every token that the model sees."""
    return 0 if adapter is None else 1000 * adapter.number


class Arithmetic:
    """In the place of a model's runner."""

    def __init__(self, cache: CacheInBlocks) -> None:
        self.cache = cache
        self.most = 0
        self.computed = 0
        self.ahead = 0
        self.scheduler: Scheduler

    def run(self, pieces: Sequence[Piece], tokens_T: Tensor | None = None) -> list[Tensor]:
        if self.scheduler.waiting:
            first, last = self.scheduler.waiting[0], self.scheduler.running[-1]
            stay = [each for each in self.scheduler.running if each.request.priority <= first.request.priority]
            fits = sum(1 + each.copies for each in (first, *stay)) <= self.scheduler.most
            assert first.request.priority >= last.request.priority or not fits, "who goes first does not wait for who goes last"
        self.cache.begin([piece.stretch for piece in pieces])
        if tokens_T is None:
            tokens_T = torch.tensor([offset(piece.adapter) + token for piece in pieces for token in piece.tokens])
        else:
            self.ahead += 1
        k_TKH = tokens_T.float()[:, None, None]
        self.cache.attend(0, torch.zeros_like(k_TKH), k_TKH, -k_TKH, scale=1.0)
        self.most = max(self.most, len(pieces))
        self.computed += len(k_TKH)
        return [self._rows(piece) for piece in pieces]

    def _rows(self, piece: Piece) -> Tensor:
        keys, values = (kept[0].view(torch.float32) for kept in (self.cache._keys, self.cache._values))
        table = self.cache.pool.tables[piece.stretch.sequence]
        held = keys[table].flatten().long().tolist()[: piece.stretch.end]
        assert held == (-values[table]).flatten().long().tolist()[: piece.stretch.end]

        def rows_of(positions: range) -> Tensor:
            rows = torch.zeros(len(positions), VOCABULARY)
            for row, at in enumerate(positions):
                rows[row, following(held[: piece.stretch.start + at + 1])] = 9.0
            return rows

        if piece.score is not None and piece.scored:
            piece.score(rows_of(piece.scored))
        return rows_of(piece.wanted)


class Crowd:
    """An engine, and what its requests must come to."""

    def __init__(self, blocks: int, overlap: bool = False, **options: Any) -> None:
        needs = KVNeeds([KVShape(1, 1)], torch.float32, torch.device("cpu"), 0, CONTEXT, CONTEXT)
        self.cache = CacheInBlocks(needs, BlockPool(blocks, SIZE), Plain(torch.float32))
        self.runner = Arithmetic(self.cache)
        context = min(CONTEXT, self.cache.capacity)
        section = InferenceSection(**options).filled(on_gpu=False)
        adapters = Adapters(torch.nn.Module(), torch.device("cpu"), lambda directory: {})  # type: ignore[arg-type]
        for name in ADAPTERS:
            adapters.load(name, "")
        ends, reads = frozenset([END]), Reads(0, 0)
        self.engine = Engine(self.runner, self.cache, section, _TOKENIZER, context, VOCABULARY, ends, reads, adapters, overlap=overlap)
        self.runner.scheduler = self.engine.scheduler
        self.asked: dict[str, tuple[list[int], Sampling]] = {}
        self.results: dict[str, Result] = {}
        self.offsets: dict[str, int] = {}

    def add(self, key: str, prompt: list[int], priority: int = 0, adapter: str | None = None, **settings: Any) -> None:
        sampling = Sampling(temperature=0, **settings)
        self.engine.add(key, prompt, sampling, priority, adapter)
        self.asked[key] = prompt, sampling
        self.offsets[key] = offset(None if adapter is None else self.engine.adapters.find(adapter))

    def replace(self, adapter: str) -> None:
        """Another one of the same name, while requests with the old one may be running."""
        self.engine.adapters.drop(adapter)
        self.engine.adapters.load(adapter, "")

    def step(self) -> None:
        for result in self.engine.step()[1]:
            assert result.key not in self.results
            self.results[result.key] = result
            self.is_right(result)
        self.check()

    def abort(self, key: str) -> None:
        numbers = {answer.number for answer in self.engine._requests[key].answers}
        result = self.engine.abort(key)
        assert result is not None
        self.results[key] = result
        assert not numbers & self.cache.pool.tables.keys(), "its blocks are free at once"
        self.check()

    def check(self) -> None:
        """What holds between any two steps."""
        self.cache.pool.check()
        scheduler = self.engine.scheduler
        running = {answer.number for answer in scheduler.running}
        assert set(self.cache.pool.tables) <= running, "who waits has nothing"
        assert len(running) <= scheduler.most
        assert not running & {answer.number for answer in scheduler.waiting}
        orders = [[answer.order for answer in those] for those in (scheduler.running, scheduler.waiting)]
        assert all(order == sorted(order) for order in orders)
        alive = {id(answer.request) for answer in (*scheduler.running, *scheduler.waiting)}
        assert alive == {id(request) for request in self.engine._requests.values()}, "every request is somewhere, and nobody else"

    def is_right(self, result: Result) -> None:
        prompt, sampling = self.asked[result.key]
        offset = self.offsets[result.key]
        expected = list(prompt)
        limit = min(sampling.max_tokens or CONTEXT, self.engine.context - len(prompt))
        stops = {*sampling.stop_token_ids, *([] if sampling.ignore_eos else [END])}
        while len(expected) - len(prompt) < limit and not (len(expected) > len(prompt) and expected[-1] in stops):
            expected.append(following([offset + token for token in expected]))
        assert [each.token_ids for each in result.completions] == [expected[len(prompt) :]] * sampling.n, result.key
        assert result.finish_reason == ("stop" if expected[-1] in stops else "length")
        if sampling.prompt_logprobs is not None:
            right = [following([offset + token for token in prompt[:at]]) == prompt[at] for at in range(1, len(prompt))]
            assert [logprob > -1 for logprob in result.prompt_logprobs] == right

    def settle(self) -> None:
        """Until nobody is there."""
        for _ in range(100_000):
            if not len(self.engine):
                break
            self.step()
        assert not len(self.engine), "requests that never end"
        assert not self.cache.pool.tables and self.cache.pool.available == self.cache.pool.count, "blocks are lost"


def some_prompt(chance: random.Random, longest: int) -> list[int]:
    """Often one that begins as another does."""
    stem = [3 + (n * 7) % 5 for n in range(longest)]
    own = [chance.randrange(3, VOCABULARY) for _ in range(longest)]
    shared = chance.choice([0, 0, SIZE, 2 * SIZE, 3 * SIZE + 1])
    return (stem[:shared] + own)[: chance.randint(1, longest)]
