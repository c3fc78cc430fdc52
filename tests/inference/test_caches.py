"""Caches that lose something, and what an answer owes to its company."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import fw
import tokens
from fw.errors import UserError
from fw.kernels import attention
from models.architectures import VOCABULARY, save

BF16 = {"dtype": "bf16", "max_context": 128}


@pytest.mark.parametrize("block_size", [1, 16])
def test_a_window_is_the_models_own(tmp_path, block_size):
    """A model without windows over a cache with one, against transformers' model that has it."""
    theirs = save("mistral-window", tmp_path / "windows")
    tokens.save(tmp_path / "windows", VOCABULARY)
    shutil.copytree(tmp_path / "windows", tmp_path / "whole")
    config = json.loads((tmp_path / "whole/config.json").read_text())
    window = config["sliding_window"]
    (tmp_path / "whole/config.json").write_text(json.dumps({**config, "sliding_window": None}))
    kept = {"name": "sliding_window", "window": window, "sinks": 0, "block_size": block_size}
    llm = fw.LLM(tmp_path / "whole", dtype="fp32", kv_cache=kept, max_sequences=3, step_tokens=12)
    asked = [torch.randint(tokens.FIRST, VOCABULARY, (length,)).tolist() for length in (3, 30, 1, 44, 12)]
    results = llm.generate(asked, max_tokens=16, temperature=0, ignore_eos=True)
    for prompt, result in zip(asked, results, strict=True):
        out = theirs.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert result.token_ids == out[0, len(prompt) :].tolist()
    assert llm.engine.scheduler.cache.live_bytes == 0


def test_a_long_answer_in_little_room(directory):
    """More tokens than there is room for at once, and nobody makes room."""
    each = fw.LLM(directory, dtype="fp32", kv_cache="paged").engine.reads.token_bytes
    kept = {"name": "sliding_window", "window": 8, "sinks": 2, "block_size": 2}
    llm = fw.LLM(directory, dtype="fp32", kv_cache=kept, max_sequences=2, step_tokens=8, kv_budget=f"{int(each * 2 * (8 + 2 + 4 + 6))}B")
    asked = [[5, 6, 7], list(range(10, 40))]
    together = llm.generate(asked, max_tokens=50, temperature=0, ignore_eos=True)
    assert [len(result.token_ids) for result in together] == [50, 50] and not llm.engine.scheduler.preemptions
    small = {**kept, "window": 64}
    with pytest.raises(UserError, match=r"inference\.max_context: \d+ is more than the model's own"):
        fw.LLM(directory, dtype="fp32", kv_cache=small, max_context=10**6)


def test_company_changes_nothing(directory):
    """To the last bit, in bfloat16: alone, beside others, in pieces, made anew, after a beginning that was known."""
    if not attention.available(torch.bfloat16, torch.device("cpu")):
        pytest.skip("no compiler")
    generator = torch.Generator().manual_seed(2)
    asked = [torch.randint(tokens.FIRST, VOCABULARY, (length,), generator=generator).tolist() for length in (3, 70, 1, 25, 40, 9)]
    asked.append(asked[1][:40] + asked[3])
    settings = {"max_tokens": 20, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    each = fw.LLM(directory, **BF16).engine.reads.token_bytes
    for cache in ("paged", {"name": "quantized"}, {"name": "quantized", "to": "int4"}):
        alone = fw.LLM(directory, **BF16, kv_cache=cache, max_sequences=1)
        expected = [alone.generate([prompt], **settings)[0] for prompt in asked]
        ways = [{}, {"step_tokens": 7, "max_sequences": 4}, {"kv_budget": f"{int(each * 144)}B"}]
        for options in ways if cache == "paged" else ways[:2]:
            llm = fw.LLM(directory, **BF16, kv_cache=cache, **options)
            for _ in range(2):
                for result, right in zip(llm.generate(asked, **settings), expected, strict=True):
                    assert (result.token_ids, result.logprobs, result.top_logprobs) == (right.token_ids, right.logprobs, right.top_logprobs)
            assert bool(llm.engine.scheduler.preemptions) == ("kv_budget" in options)


def test_what_cannot_be_kept(directory):
    with pytest.raises(UserError, match=r"kv_cache\.to: fp8 needs a GPU of compute capability 8\.9 or more; int8"):
        fw.LLM(directory, kv_cache={"name": "quantized", "to": "fp8"}, device="cpu")
    with pytest.raises(UserError, match=r"kv_cache\.group: 20 is no multiple of 16"):
        fw.LLM(directory, kv_cache={"name": "quantized", "group": 20})
    with pytest.raises(UserError, match=r"kv_cache\.window: 0 is too small; the least is 1"):
        fw.LLM(directory, kv_cache={"name": "sliding_window", "window": 0})
