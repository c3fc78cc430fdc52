"""What bodies of OpenAI's requests come to; over HTTP and in lines of a file it is the same."""

from __future__ import annotations

import pytest

import fw
from fw.errors import UserError
from fw.inference.openai import CHAT, TEXT, asked

MESSAGES = [{"role": "user", "content": "who"}]


@pytest.fixture(scope="module")
def llm(directory):
    return fw.LLM(directory, dtype="fp32")


@pytest.mark.parametrize("more", [{}, {"temperature": 2}, {"n": 3, "seed": 5}, {"temperature": 1e-39}])
def test_a_top_p_of_nothing_takes_the_likeliest(llm, more):
    wanted = asked(llm, TEXT, {"prompt": "the fox", "max_tokens": 9, "ignore_eos": True, "top_p": 0, **more}).sampling
    (result,), (greedy,) = llm.generate("the fox", wanted), llm.generate("the fox", temperature=0, max_tokens=9, ignore_eos=True)
    assert [each.token_ids for each in result.completions] == [greedy.token_ids] * wanted.n


def test_log_probabilities_of_others_beside_the_tokens(llm):
    for body, found in (
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 3),
        ({"top_logprobs": 0}, None),
        ({"top_logprobs": None}, None),
    ):
        assert asked(llm, CHAT, {"messages": MESSAGES, **body}).sampling.logprobs == found
    for body in ({}, {"logprobs": False}, {"logprobs": None}):
        with pytest.raises(UserError, match="top_logprobs: they stand beside those of the tokens; set logprobs: true"):
            asked(llm, CHAT, {"messages": MESSAGES, "top_logprobs": 3, **body})
