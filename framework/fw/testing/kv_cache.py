"""Tests of caches of keys and values."""

from __future__ import annotations

import random
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import fw
from fw.api import KVCache, KVCachePlugin, KVNeeds, KVShape, Stretch, UserError
from fw.testing.attention import formula
from fw.testing.running import Runs
from fw.testing.suite import PluginSuite

HEADS, DIM, QUERIES = 2, 16, 4
SHAPES = (KVShape(HEADS, DIM), KVShape(HEADS, DIM, window=6))
BUDGET = 1 << 20
LONGEST, STEP = 64, 16


class _Sequence:
    """What has been computed of a sequence, kept apart from the cache."""

    def __init__(self, number: int, before: _Sequence | None = None, length: int = 0) -> None:
        self.number = number
        nothing = [torch.zeros(0, HEADS, DIM) for _ in SHAPES]
        self.keys: list[Tensor] = nothing if before is None else [x[:length].clone() for x in before.keys]
        self.values: list[Tensor] = list(nothing) if before is None else [x[:length].clone() for x in before.values]

    @property
    def length(self) -> int:
        return len(self.keys[0])


class KVCacheSuite(PluginSuite):
    """A cache beside attention written out over everything that was computed, through steps of many sequences at once.

    Attributes:
        tolerance: absolute, of results in fp32 whose inputs are normal numbers; wider for a cache that rounds (``lossless = False``).
        window: positions that it keeps at least, where it does not keep all; sequences here stay within it.
    """

    tolerance: ClassVar[float] = 1e-5
    window: ClassVar[int | None] = None

    def cache(self, budget: int = BUDGET) -> KVCache:
        """An empty one for two blocks, of which one has a window."""
        found: KVCache = self.make().make(KVNeeds(SHAPES, torch.float32, torch.device("cpu"), budget, LONGEST, STEP))
        return found

    def step(self, cache: KVCache, taken: list[tuple[_Sequence, int]], generator: torch.Generator) -> None:
        """Compute so many tokens of each sequence, and compare."""
        stretches = [Stretch(sequence.number, sequence.length, count) for sequence, count in taken]
        for stretch in stretches:
            assert cache.reserve(stretch.sequence, stretch.start, stretch.end), "there is room"
        cache.begin(stretches)
        for block, shape in enumerate(SHAPES):
            tokens = sum(count for _, count in taken)
            q, k, v = (torch.randn(tokens, heads, DIM, generator=generator) for heads in (QUERIES, HEADS, HEADS))
            out = cache.attend(block, q, k, v, scale=DIM**-0.5)
            assert out.shape == q.shape and out.dtype == q.dtype
            at = 0
            for sequence, count in taken:
                own = slice(at, at + count)
                sequence.keys[block] = torch.cat([sequence.keys[block], k[own]])
                sequence.values[block] = torch.cat([sequence.values[block], v[own]])
                expected = _attended(q[own], sequence.keys[block], sequence.values[block], shape.window)
                torch.testing.assert_close(out[own], expected, rtol=0, atol=self.tolerance)
                at += count

    def test_results_are_those_of_no_cache_whatever_comes_together(self) -> None:
        cache, generator, chance = self.cache(), torch.Generator().manual_seed(0), random.Random(0)
        living: list[_Sequence] = []
        for number in range(40):
            if chance.random() < 0.5 and len(living) < 5:
                living.append(_Sequence(number))
            if len(living) > 1 and chance.random() < 0.15:
                cache.release(living.pop(chance.randrange(len(living))).number)
            some = [one for one in living if one.length < min(LONGEST, self.window or LONGEST) - STEP and chance.random() < 0.8]
            if some:
                self.step(cache, [(one, chance.choice([1, 1, 1, 2, 7, STEP])) for one in some], generator)
        for one in living:
            cache.release(one.number)
        assert cache.used_bytes == 0, "released sequences take nothing"

    def test_a_fork_goes_its_own_way(self) -> None:
        cache, generator = self.cache(), torch.Generator().manual_seed(0)
        first = _Sequence(1)
        self.step(cache, [(first, 11)], generator)
        for number, length in ((2, 11), (3, 5)):
            assert cache.fork(1, number, length)
            second = _Sequence(number, first, length)
            self.step(cache, [(first, 1), (second, 3)], generator)
            self.step(cache, [(second, 1), (first, 2)], generator)
        cache.release(1)
        self.step(cache, [(second, 1)], generator)

    def test_where_there_is_no_room_it_says_so_and_nothing_changes(self) -> None:
        per_token = self.make().token_bytes(SHAPES, torch.float32)
        cache = self.cache(int(per_token * LONGEST * 2))
        numbers = []
        for number in range(1000):
            if not cache.reserve(number, 0, STEP):
                break
            numbers.append(number)
        else:
            pytest.fail(f"1000 sequences of {STEP} tokens had room in {int(per_token * LONGEST * 2)} bytes")
        assert numbers, "one had none"
        before = cache.used_bytes
        assert not cache.reserve(numbers[-1] + 1, 0, STEP) and cache.used_bytes == before
        cache.release(numbers[0])
        assert cache.reserve(numbers[-1] + 1, 0, STEP), "what was released is there again"

    def test_it_takes_what_it_says_and_no_more_than_it_may(self) -> None:
        per_token = self.make().token_bytes(SHAPES, torch.float32)
        cache, generator = self.cache(), torch.Generator().manual_seed(0)
        sequences = [_Sequence(number) for number in range(4)]
        self.step(cache, [(one, STEP) for one in sequences], generator)
        assert per_token * 4 * STEP <= cache.live_bytes <= BUDGET

    def test_a_budget_that_holds_nothing_is_refused(self) -> None:
        with pytest.raises(UserError):
            self.cache(16)

    def test_a_model_generates_the_same_with_it(self, runs: Runs) -> None:
        """Greedily, several texts at once, beside the same model called on the whole text for each token."""
        text = runs.directory / "text.txt"
        text.write_text("\n\n".join(f"What {n} and {n} make is {2 * n}." for n in range(300)))
        words = {
            "data": {"name": "text", "files": [str(text)], "tokenizer": "byte"},
            "train": {"save_every": 6, "sequence_length": LONGEST},
        }
        directory = runs.train("model", words).ok().directory / "checkpoints" / "latest"
        prompts = [[65 + n for n in range(count)] for count in (3, 9, 1)]
        llm = fw.LLM(directory, dtype="fp32", device="cpu", kv_cache=self.choice, max_context=LONGEST, max_sequences=2)
        found = [result.token_ids for result in llm.generate(prompts, max_tokens=8, temperature=0, ignore_eos=True)]
        assert [len(each) for each in found] == [8] * 3
        assert issubclass(self.plugin, KVCachePlugin)
        if self.plugin.lossless:
            model = fw.load_model(directory, dtype=torch.float32)
            assert found == [_greedy(model, prompt, 8) for prompt in prompts]


def _attended(q_QNH: Tensor, k_LKH: Tensor, v_LKH: Tensor, window: int | None) -> Tensor:
    queries, keys = len(q_QNH), len(k_LKH)
    at = torch.arange(keys)
    behind = at[keys - queries :, None] - at
    seen = (behind >= 0) & (behind < (window or keys))
    q, k, v = (x.double().transpose(0, 1)[None] for x in (q_QNH, k_LKH, v_LKH))
    return formula(q, k, v, seen, DIM**-0.5, None)[0].transpose(0, 1).float()


def _greedy(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]
