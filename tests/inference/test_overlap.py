"""Steps that begin before the tokens of the one before are known: the same answers. On the CPU, which gains nothing by it."""

from __future__ import annotations

import pytest
import torch

import fw
import tokens
from models.architectures import VOCABULARY

NEW = 24


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randint(tokens.FIRST, VOCABULARY, (1 + (7 * n + 3) % 20,), generator=generator).tolist() for n in range(count)]


class Both:
    """The same model, with and without; a step that begins early is counted."""

    def __init__(self, directory, **options) -> None:
        self.overlapping, self.plain = (fw.LLM(directory, dtype="fp32", device="cpu", **options) for _ in range(2))
        self.overlapping.engine.overlap = True
        self.early = 0
        runner = self.overlapping.engine.runner
        run = runner.run

        def counted(pieces, tokens_T=None):
            self.early += tokens_T is not None
            return run(pieces, tokens_T)

        runner.run = counted

    def same(self, asked: list[list[int]], settings) -> None:
        of_each = settings if isinstance(settings, list) else [settings] * len(asked)
        one, other = (self.answers(llm, asked, of_each) for llm in (self.overlapping, self.plain))
        assert one.keys() == other.keys() == {str(number) for number in range(len(asked))}
        for key in one:
            for found, expected in zip(one[key], other[key], strict=True):
                assert (found.token_ids, found.text, found.finish_reason) == (expected.token_ids, expected.text, expected.finish_reason)
                # A step with somebody in it who has just ended has more rows, which products in fp32 may be divided otherwise for.
                assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)

    @staticmethod
    def answers(llm, asked: list[list[int]], of_each) -> dict:
        for number, (prompt, one) in enumerate(zip(asked, of_each, strict=True)):
            llm.engine.add(str(number), prompt, llm.sampling(**{"max_tokens": NEW, "seed": number, **one}))
        results = {}
        while len(llm.engine):
            results |= {result.key: result.completions for result in llm.engine.step()[1]}
        assert llm.engine.scheduler.cache.used_bytes == 0
        return results


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0, "ignore_eos": True}, {"temperature": 0.8}, {"temperature": 1.3, "top_p": 0.9, "top_k": 30, "min_p": 0.01, "n": 2}],
    ids=str,
)
def test_answers_are_the_same(directory, settings, replay):
    both = Both(directory, replay=replay)
    for count in (1, 3, 6):
        both.same(prompts(count), settings)
    assert both.early > 3 * (NEW - 4)


def test_some_end_while_others_go_on(directory):
    """By a number of tokens, which is known before, and by tokens that stop them, which are not."""
    both = Both(directory)
    asked = prompts(8)
    both.same(asked, {"temperature": 0, "max_tokens": NEW})
    heard = [result.token_ids for result in both.plain.generate(asked, temperature=0, max_tokens=NEW, ignore_eos=True)]
    limits = [{"temperature": 0, "max_tokens": 1 + 3 * n, "ignore_eos": True} for n in range(8)]
    both.same(asked, limits)
    before = both.early
    both.same(asked, [{"temperature": 0, "stop_token_ids": [ids[2 + n]], "ignore_eos": True} for n, ids in enumerate(heard)])
    assert both.early > before + 5


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5},
        {"logit_bias": {9: 3.0}},
        {"min_tokens": NEW},
        {"logprobs": 2},
    ],
    ids=str,
)
def test_what_wants_to_see_the_token_first_does(directory, settings):
    both = Both(directory)
    both.same(prompts(3), {"temperature": 0, **settings})
    assert both.early == 0


def test_a_few_tokens_at_least_and_then_ahead(directory):
    both = Both(directory)
    both.same(prompts(3), {"temperature": 0, "min_tokens": 8, "ignore_eos": True})
    assert 0 < both.early <= NEW - 8


def test_who_comes_later_is_let_in(directory):
    """In the step after the one that had begun."""
    llm = fw.LLM(directory, dtype="fp32", device="cpu")
    llm.engine.overlap = True
    sampling = llm.sampling(temperature=0, max_tokens=NEW, ignore_eos=True)
    first, second = prompts(2)
    llm.engine.add("first", first, sampling)
    for _ in range(4):
        llm.engine.step()
    assert llm.engine._ahead is not None
    llm.engine.add("second", second, sampling)
    llm.engine.step()
    deltas, _ = llm.engine.step()
    assert {delta.key for delta in deltas} == {"first", "second"}
    llm.engine.abort("first")
    deltas, _ = llm.engine.step()
    assert {delta.key for delta in deltas} == {"second"}, "a token of who is gone is nobody's"
    llm.engine.abort("second")
    assert llm.engine.step() == ([], []) and llm.engine.scheduler.cache.used_bytes == 0
    alone = fw.LLM(directory, dtype="fp32", device="cpu").generate([second], temperature=0, max_tokens=NEW, ignore_eos=True)
    assert llm.generate([second], temperature=0, max_tokens=NEW, ignore_eos=True)[0].token_ids == alone[0].token_ids
