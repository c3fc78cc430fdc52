"""Requests by the thousand, with little room: no block lost or given twice, every answer the right one, every invariant at every step."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from crowd import ADAPTERS, CONTEXT, END, SIZE, VOCABULARY, Crowd, some_prompt
from fw.errors import UserError


@pytest.mark.parametrize(("speculate", "overlap"), [(0, False), (3, False), (0, True)])
def test_ten_thousand_requests(speculate, overlap):
    chance = random.Random(0)
    crowd = Crowd(blocks=40, overlap=overlap, max_sequences=8, step_tokens=40, speculate=speculate)
    most_waiting = 0
    for number in range(10_000):
        ask(crowd, str(number), chance, plain=overlap and number % 200 < 150)
        while len(crowd.engine) > chance.randint(4, 24):
            crowd.step()
        if chance.random() < 0.1 and crowd.engine._requests:
            crowd.abort(chance.choice(list(crowd.engine._requests)))
        most_waiting = max(most_waiting, len(crowd.engine.scheduler.waiting))
    crowd.settle()
    assert len(crowd.results) == 10_000
    ended = [result.finish_reason for result in crowd.results.values()]
    assert min(ended.count(reason) for reason in ("stop", "length", "abort")) > 500
    assert crowd.engine.scheduler.preemptions > 100 and crowd.runner.most == 8 and most_waiting > 10
    assert (crowd.runner.ahead > 1000) == overlap
    assert sum(result.cached_tokens > 0 for result in crowd.results.values()) > 1000


def ask(crowd: Crowd, key: str, chance: random.Random, plain: bool) -> None:
    crowd.add(
        key,
        some_prompt(chance, chance.choice([3, 20, 40])),
        priority=chance.choice([0, 0, 0, 1, -1]),
        max_tokens=chance.choice([1, 5, 12, 40, None]),
        n=chance.choice([1, 1, 1, 1, 2, 4]),
        stop_token_ids=chance.choice([(), (), (9, 12)]),
        prompt_logprobs=None if plain else chance.choice([None, None, None, 0]),
        adapter=None if plain else chance.choice([None, None, *ADAPTERS]),
    )
    if chance.random() < 0.01:
        crowd.replace(chance.choice(ADAPTERS))


class Machine(RuleBasedStateMachine):
    """The same in any order that breaks something."""

    @initialize(
        blocks=st.integers(3, 24),
        sequences=st.integers(1, 6),
        step=st.integers(6, 40),
        share=st.one_of(st.none(), st.integers(1, 9)),
        speculate=st.sampled_from([0, 0, 1, 4]),
        overlap=st.booleans(),
    )
    def begin(self, blocks: int, sequences: int, step: int, share: int | None, speculate: int, overlap: bool) -> None:
        self.crowd = Crowd(blocks, overlap, max_sequences=sequences, step_tokens=step, prompt_tokens=share, speculate=speculate)
        self.count, self.plain = 0, overlap
        """Whether nobody asks for what keeps others from going ahead."""

    @rule(
        prompt=st.lists(st.integers(3, 5), min_size=1, max_size=CONTEXT),
        priority=st.integers(-1, 1),
        most=st.one_of(st.none(), st.integers(1, 20)),
        n=st.integers(1, 3),
        logprobs=st.sampled_from([None, 0]),
        adapter=st.sampled_from([None, *ADAPTERS]),
    )
    def add(self, prompt: list[int], priority: int, most: int | None, n: int, logprobs: int | None, adapter: str | None) -> None:
        engine = self.crowd.engine
        if self.plain:
            logprobs = adapter = None
        fits = len(prompt) < engine.context and n <= engine.scheduler.most
        try:
            self.crowd.add(str(self.count), prompt, priority, adapter, max_tokens=most, n=n, prompt_logprobs=logprobs)
            assert fits
            self.count += 1
        except UserError:
            assert not fits

    @precondition(lambda self: self.count)
    @rule(which=st.integers(0))
    def abort(self, which: int) -> None:
        if keys := list(self.crowd.engine._requests):
            self.crowd.abort(keys[which % len(keys)])

    @rule(adapter=st.sampled_from(ADAPTERS))
    def replace(self, adapter: str) -> None:
        self.crowd.replace(adapter)

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.crowd.step()

    def teardown(self) -> None:
        if hasattr(self, "crowd"):
            self.crowd.settle()
            assert len(self.crowd.results) == self.count


Machine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
test_any_order = Machine.TestCase


def test_a_long_prompt_does_not_keep_others_waiting():
    crowd = Crowd(blocks=40, max_sequences=4, step_tokens=12)
    crowd.add("long", [5] * 40)
    crowd.add("short", [6], max_tokens=2)
    crowd.step()
    crowd.step()
    assert "short" in crowd.results or len(crowd.engine._requests["short"].answers[0].own) == 1
    assert not crowd.engine._requests["long"].answers[0].generated


def test_several_long_prompts_do_not_either():
    """Each could have half of a step, so that two would have all of it."""
    crowd = Crowd(blocks=60, max_sequences=8, step_tokens=16)
    for key in "abc":
        crowd.add(key, [ord(key) % 20 + 3] * 44)
    crowd.step()
    assert crowd.runner.computed == 16
    crowd.add("short", [6, 7], max_tokens=1)
    crowd.step()  # in which the third one comes in
    crowd.step()
    assert "short" in crowd.results
    assert crowd.runner.computed == 48
    computed = [answer.computed for key in "abc" for answer in crowd.engine._requests[key].answers]
    assert sorted(computed, reverse=True) == computed and all(computed), "who came first goes first"


def test_what_was_left_for_one_who_finds_no_room_is_used():
    crowd = Crowd(blocks=24, max_sequences=8, step_tokens=16)
    for key in "abc":
        crowd.add(key, [ord(key) % 20 + 3] * 44)
    for steps in range(1, 7):
        crowd.step()
        assert crowd.runner.computed == 16 * steps or crowd.engine.scheduler.preemptions


def test_who_comes_last_makes_room_and_goes_on_where_it_was():
    """What it had is known still as far as nobody needed the room, so that less than all is computed anew."""
    crowd = Crowd(blocks=9, max_sequences=2, step_tokens=40)
    for key in ("first", "last"):
        crowd.add(key, [ord(key[0]) % 20 + 3] * 10, max_tokens=12, ignore_eos=True)
    crowd.settle()
    assert crowd.engine.scheduler.preemptions == 1
    assert 2 * (10 + 11) < crowd.runner.computed < 3 * (10 + 11) - 2 * SIZE


def test_priorities():
    crowd = Crowd(blocks=40, max_sequences=1, step_tokens=40)
    for key, priority in (("a", 0), ("b", 0), ("urgent", -5), ("idle", 5)):
        crowd.add(key, [7, 8], priority, max_tokens=3)
    crowd.settle()
    assert list(crowd.results) == ["urgent", "a", "b", "idle"]


@pytest.mark.parametrize("blocks, n", [(40, 1), (11, 1), (40, 2)])
def test_who_goes_first_takes_the_place_of_who_goes_last(blocks, n):
    """Where there is neither a seat nor room, and at once; whoever gave way goes on later where it was."""
    crowd = Crowd(blocks=blocks, max_sequences=2, step_tokens=40)
    for key in "ab":
        crowd.add(key, [ord(key) % 20 + 3] * 10, priority=1, max_tokens=9, ignore_eos=True)
    for _ in range(3):
        crowd.step()
    crowd.add("urgent", [7] * 10, max_tokens=4, ignore_eos=True, n=n)
    for _ in range(4):
        crowd.step()
    assert list(crowd.results) == ["urgent"]
    assert crowd.engine.scheduler.preemptions == n
    crowd.settle()
    assert list(crowd.results) == ["urgent", "a", "b"]
    assert crowd.engine.scheduler.prompt_tokens == 30, "each of them counts once"


def test_who_goes_first_takes_no_place_that_does_not_help():
    """It needs more than all have that go after it: they go on until there are as many."""
    crowd = Crowd(blocks=40, max_sequences=3, step_tokens=40)
    crowd.add("first", [5] * 4, max_tokens=4, ignore_eos=True, n=2)
    crowd.add("last", [6] * 4, priority=1, max_tokens=9, ignore_eos=True)
    crowd.step()
    crowd.add("wide", [7] * 4, max_tokens=3, ignore_eos=True, n=3)
    for _ in range(3):
        crowd.step()
    assert list(crowd.results) == ["first"] and crowd.engine._requests["last"].answers[0].generated == 4
    assert crowd.engine.scheduler.preemptions == 0
    crowd.step()
    assert crowd.engine.scheduler.preemptions == 1, "now it helps"
    crowd.settle()
    assert list(crowd.results) == ["first", "wide", "last"]


@pytest.mark.parametrize("aborted", [False, True])
def test_nothing_is_left_of_a_request_that_has_ended(aborted):
    """At once, though nobody collects garbage: circles of thousands of requests would be megabytes."""
    crowd = Crowd(blocks=40, max_sequences=4, step_tokens=40)
    gc.disable()
    try:
        for number in range(6):
            crowd.add(str(number), [7] * 10, max_tokens=4, n=1 + number % 2)
        there = [weakref.ref(request) for request in crowd.engine._requests.values()]
        there += [weakref.ref(answer) for request in crowd.engine._requests.values() for answer in request.answers]
        if aborted:
            crowd.step()
            for number in range(6):
                crowd.abort(str(number))
        crowd.settle()
        assert len(crowd.results) == 6 and not [ref for ref in there if ref() is not None]
    finally:
        gc.enable()


def test_what_is_refused_at_once():
    crowd = Crowd(blocks=5, max_sequences=3, step_tokens=40)
    for prompt, more, said in (
        ([], {}, "has no tokens"),
        ([5] * 20, {}, "20 tokens, and prompt and answer together at most 20"),
        ([VOCABULARY], {}, f"token {VOCABULARY}, and the model has {VOCABULARY}"),
        ([5], {"n": 4}, "4 answers are more than run at once"),
        ([5] * 9, {"min_tokens": 12}, "min_tokens: 12 are more than the 11 that the prompt leaves of 20"),
        ([5], {"stop_token_ids": [-1]}, "stop_token_ids has token -1"),
    ):
        with pytest.raises(UserError, match=said):
            crowd.add("x", prompt, **more)
    assert not len(crowd.engine)
    assert (SIZE, END) == (4, 2)
