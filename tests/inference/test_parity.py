"""What the engine generates against transformers' own generate, for every architecture and every cache that loses nothing."""

from __future__ import annotations

import pytest
import torch

import fw
import tokens
from fw_plugins.kv_cache import in_blocks
from models.architectures import CASES, VOCABULARY, save

LENGTHS = (5, 1, 40, 17, 60, 2)
NEW = 14
CACHES = {
    "paged": {"name": "paged", "block_size": 4},
    "paged, alone": {"name": "paged", "block_size": 16, "reuse_prefixes": False},
    "paged, in torch's operators": {"name": "paged", "block_size": 16},
    "contiguous": {"name": "contiguous"},
}
WAYS = {
    "at once": {},
    "in pieces": {"step_tokens": 12, "max_sequences": 4},
    "one after another": {"max_sequences": 1},
    "little room": {"max_context": 80},  # and a budget of a little more, so that sequences make room for others
}


def prompts(case: str) -> list[list[int]]:
    """Ragged; a model of a short context has short ones."""
    generator = torch.Generator().manual_seed(1)
    longest = CASES[case].get("max_position_embeddings", CASES[case].get("n_positions", 0)) - NEW
    found = [torch.randint(tokens.FIRST, VOCABULARY, (min(n, longest),), generator=generator).tolist() for n in LENGTHS]
    return [*found, found[2][:20] + found[0] if longest > 30 else found[0][:1]]  # begins as another one does


@pytest.fixture(scope="module")
def expected(request, tmp_path_factory):
    """A case's name, its directory, and what transformers generates for each prompt alone: ids, and their log-probabilities."""
    directory = tmp_path_factory.mktemp(request.param)
    theirs = save(request.param, directory)
    tokens.save(directory, VOCABULARY)
    found = []
    for prompt in prompts(request.param):
        out = theirs.generate(
            torch.tensor([prompt]),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        ids = out.sequences[0, len(prompt) :].tolist()
        found.append((ids, [float(row[0].log_softmax(-1)[token]) for row, token in zip(out.logits, ids, strict=True)]))
    return request.param, directory, found


# What a cache has of a model is heads, windows and caps.
@pytest.mark.parametrize(
    "expected, cache",
    [(case, cache) for case in CASES for cache in CACHES if cache == "paged" or case in ("llama", "mistral-window", "gemma2", "gpt2")],
    indirect=["expected"],
)
def test_greedy_tokens_and_their_logprobs(expected, cache, monkeypatch):
    case, directory, theirs = expected
    if "operators" in cache:
        monkeypatch.setattr(in_blocks, "available", lambda *_: False)
    for way, options in WAYS.items():
        if way == "little room":
            if case == "llama-dynamic":
                continue
            token_bytes = sum(2 * s.heads * s.head_dim for s in fw.load_model(directory).kv_shapes) * 4
            options = {**options, "kv_budget": f"{token_bytes * 112}B"}
        llm = fw.LLM(directory, dtype="fp32", kv_cache=CACHES[cache], **options)
        asked = prompts(case)
        for again in range(2):  # the second time, what is known of the first is there
            results = llm.generate(asked, max_tokens=NEW, temperature=0, ignore_eos=True)
            for prompt, result, (ids, logprobs) in zip(asked, results, theirs, strict=True):
                assert result.token_ids == ids, f"{case}, {cache}, {way}, {len(prompt)} tokens"
                assert result.logprobs == pytest.approx(logprobs, abs=1e-4)
                assert result.finish_reason == "length"
            known = [result.cached_tokens for result in results]
            if cache == "paged" and way == "one after another" and case != "llama-dynamic":
                assert known[-1] >= 20, "a beginning that another prompt has"
                assert not again or known[4] >= 56, "the prompt itself"
            if CACHES[cache]["name"] != "paged" or "alone" in cache:
                assert not any(known)
        if way == "little room":
            assert llm.engine.scheduler.preemptions, "nobody had to make room"
        assert not llm.engine.scheduler.running and not llm.engine.scheduler.waiting


@pytest.mark.parametrize("expected", ["llama", "gpt2", "gemma2"], indirect=True)
def test_logprobs_of_the_prompt(expected):
    """In pieces, beside others, and also where a beginning is known already."""
    case, directory, _ = expected
    model = fw.load_model(directory)
    asked = prompts(case)
    llm = fw.LLM(directory, dtype="fp32", kv_cache=CACHES["paged"], step_tokens=16, max_sequences=3)
    for _ in range(2):
        for prompt, result in zip(asked, llm.generate(asked, max_tokens=2, prompt_logprobs=3, temperature=0), strict=True):
            rows = model(torch.tensor([prompt])).detach()[0].log_softmax(-1)
            assert result.prompt_logprobs == pytest.approx([float(rows[at, token]) for at, token in enumerate(prompt[1:])], abs=1e-4)
            for top, row in zip(result.prompt_top_logprobs, rows, strict=False):
                values, ids = row.topk(3)
                assert list(top) == ids.tolist() and list(top.values()) == pytest.approx(values.tolist(), abs=1e-4)
            assert result.cached_tokens == 0
