"""Requests that want nothing but what the model makes of the prompt: log-probabilities, or hidden states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from fw import LLM
from fw.errors import UserError

PROMPTS = [[1, 9, 8, 7, 6, 5, 4, 9], [1, 12], [1, *range(5, 60)]]


def _hidden(directory: Path, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return AutoModel.from_pretrained(directory, dtype=torch.float32)(torch.tensor([ids])).last_hidden_state[0]


@pytest.mark.parametrize("case", ["llama", "gpt2", "gemma2"])
def test_embeddings_are_the_hidden_states_of_transformers(small_model: Callable[[str], Path], case: str) -> None:
    directory = small_model(case)
    llm = LLM(directory, dtype="fp32", step_tokens=24, max_sequences=8)  # prompts in pieces
    for _ in range(2):  # the second time much of them is in the cache
        means, lasts = llm.embed(PROMPTS), llm.embed(PROMPTS, pooling="last")
        for ids, mean, last in zip(PROMPTS, means, lasts, strict=True):
            hidden = _hidden(directory, ids)
            torch.testing.assert_close(torch.tensor(mean), hidden.mean(0), atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(torch.tensor(last), hidden[-1], atol=1e-5, rtol=1e-4)
    assert not len(llm.engine)


def test_embeddings_beside_answers_and_preempted(small_model: Callable[[str], Path]) -> None:
    """Room for two of the three at once: one begins anew, and its mean counts no token twice."""
    llm = LLM(
        small_model("llama"), dtype="fp32", step_tokens=16, max_sequences=8, kv_budget="40KiB", kv_cache={"name": "paged", "block_size": 8}
    )
    alone = llm.embed([PROMPTS[2]])[0]
    from fw.inference.options import Sampling

    engine = llm.engine
    engine.add("answer", [1, 5, 6], Sampling(max_tokens=60, temperature=0, ignore_eos=True))
    engine.add("first", PROMPTS[2], Sampling(), pooling="mean")
    engine.add("second", PROMPTS[2], Sampling(), pooling="mean")
    found = {}
    while len(engine):
        found |= {result.key: result for result in engine.step()[1]}
    assert engine.scheduler.preemptions > 0
    assert len(found["answer"].token_ids) == 60
    for key in ("first", "second"):
        torch.testing.assert_close(torch.tensor(found[key].embedding), torch.tensor(alone), atol=1e-6, rtol=1e-5)


def test_no_tokens_but_the_prompts_log_probabilities(small_model: Callable[[str], Path]) -> None:
    directory = small_model("llama")
    llm = LLM(directory, dtype="fp32")
    results = llm.generate(PROMPTS, max_tokens=0, prompt_logprobs=2, n=2)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for ids, result in zip(PROMPTS, results, strict=True):
        with torch.no_grad():
            logprobs = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(result.prompt_logprobs), expected, atol=1e-4, rtol=0)
        assert [len(top) for top in result.prompt_top_logprobs] == [2] * (len(ids) - 1)
        assert [(each.token_ids, each.text, each.finish_reason) for each in result.completions] == [([], "", "length")] * 2


def test_a_prompt_of_the_whole_context_has_room_where_nothing_follows(small_model: Callable[[str], Path]) -> None:
    llm = LLM(small_model("llama"), max_context=16)
    whole = [5] * 16
    assert len(llm.generate([whole], max_tokens=0, prompt_logprobs=0)[0].prompt_logprobs) == 15
    assert llm.embed([whole])[0]
    with pytest.raises(UserError, match="16 tokens"):
        llm.generate([whole], max_tokens=1)
    with pytest.raises(UserError, match="17 tokens"):
        llm.embed([[5] * 17])


def test_hidden_states_of_ranks_are_those_of_one(small_model: Callable[[str], Path]) -> None:
    alone = LLM(small_model("llama"), dtype="fp32").embed(PROMPTS)
    divided = LLM(small_model("llama"), dtype="fp32", tensor=2)
    try:
        for one, other in zip(alone, divided.embed(PROMPTS), strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), atol=1e-5, rtol=1e-4)
        assert divided.generate(PROMPTS, max_tokens=3, temperature=0)[0].token_ids
    finally:
        divided.close()
