"""How tokens are chosen, against transformers' processors of logits, and against probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from sys import float_info

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fw.errors import UserError
from fw.inference.options import Sampling
from fw.inference.sampling import change, choose, probabilities
from fw.inference.sequence import Answer, Request

VOCABULARY = 200
_numbers = count()


def answer(own: Sequence[int] = (), prompt: Sequence[int] = (5, 6, 7), **settings) -> Answer:
    sampling = Sampling(**settings)
    request = Request("one", list(prompt), sampling, 0, 0, 100)
    generator = None if sampling.greedy else torch.Generator().manual_seed(next(_numbers))
    return Answer(request, next(_numbers), 0, [*prompt, *own], generator)


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 20, 500])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 0.01])
@pytest.mark.parametrize("min_p", [0.0, 0.1])
def test_probabilities_are_those_of_transformers(temperature, top_k, top_p, min_p):
    steps = [TemperatureLogitsWarper(temperature)] if temperature != 1 else []
    steps += [TopKLogitsWarper(top_k)] if top_k else []
    steps += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    steps += [MinPLogitsWarper(min_p)] if min_p else []
    expected = LogitsProcessorList(steps)(torch.zeros(1, 1, dtype=torch.int64), logits()[None])[0].softmax(-1)
    found = probabilities(logits(), Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    torch.testing.assert_close(found, expected)


def test_tokens_come_as_often_as_they_are_probable():
    """Chi-squared over 4,000 draws, each of a row of a batch; 99.99 % of fair draws pass."""
    row = logits(3)[:12]
    one = answer(temperature=0.8, top_k=8)
    drawn = torch.tensor([choose(row[None], [one], [], frozenset()).told().tokens[0] for _ in range(4000)])
    p = probabilities(row, one.request.sampling)
    counts = torch.bincount(drawn, minlength=12)
    assert not counts[p == 0].any()
    chi = ((counts[p > 0] - 4000 * p[p > 0]) ** 2 / (4000 * p[p > 0])).sum()
    assert chi < 31.8, "7 degrees of freedom"


def test_a_row_does_not_depend_on_its_company():
    rows = torch.stack([logits(n) for n in range(5)])

    def asked() -> list[Answer]:
        kinds = [{"temperature": 0}, {"temperature": 0.9}, {"top_p": 0.8, "seed": 4}, {"repetition_penalty": 1.5}, {"min_tokens": 3}]
        found = [answer([9, 9, 10], **kind) for kind in kinds]
        for number, one in enumerate(found):
            one.generator = torch.Generator().manual_seed(number)
        return found

    together = choose(rows, asked(), [], frozenset([2])).told().tokens
    alone = [choose(rows[n : n + 1], [asked()[n]], [], frozenset([2])).told().tokens[0] for n in range(5)]
    assert together == alone


def test_repetition_is_that_of_transformers():
    one = answer([9, 9, 50], temperature=0, repetition_penalty=1.7)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([one.tokens]), logits()[None])
    rows = logits()[None].clone()
    change(rows, [one], frozenset())
    torch.testing.assert_close(rows, expected)


def test_presence_and_frequency_count_the_answer_alone():
    """https://platform.openai.com/docs/api-reference: logit - count · frequency - (count > 0) · presence."""
    rows = logits()[None].clone()
    change(rows, [answer([9, 9, 50], temperature=0, presence_penalty=0.5, frequency_penalty=0.25)], frozenset())
    changed = (rows[0] - logits()).nonzero().flatten().tolist()
    assert changed == [9, 50]
    assert float(rows[0, 9] - logits()[9]) == pytest.approx(-1.0, abs=1e-6) and float(rows[0, 50] - logits()[50]) == pytest.approx(
        -0.75, abs=1e-6
    )


def test_bias_and_the_least_number_of_tokens():
    row = logits()
    best, second = row.topk(2).indices.tolist()
    assert choose(row[None], [answer(temperature=0, logit_bias={77: 100.0})], [], frozenset()).told().tokens == [77]
    assert choose(row[None], [answer(temperature=0, min_tokens=1)], [], frozenset([best])).told().tokens == [second], "the model's end"
    assert choose(row[None], [answer(temperature=0, min_tokens=1, stop_token_ids=[best])], [], frozenset()).told().tokens == [second]
    assert choose(row[None], [answer([1], temperature=0, min_tokens=1)], [], frozenset([best])).told().tokens == [best], "enough"


@pytest.mark.parametrize("settings", [{"top_p": float_info.min}, {"temperature": 9e-6}, {"temperature": 1e-45}, {"temperature": 5e-324}])
def test_what_leaves_the_likeliest_alone(settings):
    """Numbers that are 0 in fp32, or by which logits are more than it holds."""
    rows = torch.stack([logits(n) for n in range(8)])
    answers = [answer(**settings) for _ in rows]
    assert choose(rows, answers, [], frozenset()).told().tokens == rows.argmax(-1).tolist()


def test_minus_one_is_nothing_in_particular():
    """As vLLM's words have it: all of the likeliest, and another seed each time."""
    assert Sampling(top_k=-1, seed=-1) == Sampling(top_k=0, seed=None)


def test_large_numbers_stay_numbers():
    """A bias that no other logit comes near, of a low temperature; a temperature at which all are alike but for what a form rules out."""
    bias = answer(temperature=2e-5, top_p=0.9, logit_bias={77: 1e38})
    assert choose(logits()[None], [bias], [], frozenset()).told().tokens == [77]
    row = logits().index_fill(0, torch.arange(100), -torch.inf)
    torch.testing.assert_close(probabilities(row, Sampling(temperature=3e38)), torch.tensor([0.0, 0.01]).repeat_interleave(100))


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.9}])
def test_no_token_where_there_is_none(settings):
    """Of logits that are not numbers, or all ruled out; other rows are as they would be."""
    whole, broken = logits(), logits()
    broken[3] = torch.nan
    rows = [whole, broken, torch.full_like(whole, -torch.inf), whole.index_fill(0, torch.tensor(4), torch.inf)]
    for asked in ([], [0, 1, 2, 3]):
        tokens = choose(rows, [answer(**settings) for _ in rows], asked, frozenset()).told().tokens
        assert tokens[0] is not None and tokens[1:] == [None] * 3


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"temperature": -1}, "temperature: -1 is not at least 0"),
        ({"temperature": float("inf")}, "temperature: inf is more than fp32 holds"),
        ({"logit_bias": {5: float("inf")}}, "logit_bias: inf of token 5 is no number that fp32 holds"),
        ({"logit_bias": {"6": -1e39}}, r"logit_bias: -1e\+39 of token 6"),
        ({"logit_bias": {6: float("nan")}}, "logit_bias: nan of token 6"),
        ({"top_p": 0}, "top_p and repetition_penalty must be above 0"),
        ({"top_p": 1.5}, "top_p: 1.5 is not between 0 and 1"),
        ({"n": 3, "best_of": 2}, "best_of: 2 is not at least 3"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens: 9 is more than max_tokens 3"),
        ({"stop": [""]}, "an empty text ends every answer"),
        ({"max_tokens": -1}, "max_tokens: -1 is not at least 0"),
    ],
)
def test_what_cannot_be_asked_for(settings, said):
    with pytest.raises(UserError, match=said.replace("(", r"\(")):
        Sampling(**settings)
