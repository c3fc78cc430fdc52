"""Caches that lose something, and what an answer owes to its company."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import fw
import tokens
from fw.config import Config, overridden
from fw.errors import UserError
from fw.kernels import attention
from fw.kinds import make
from fw.kinds.kv_cache import KVCachePlugin
from fw.kinds.model import KVShape
from fw.planning.generation import plan_generation
from fw.recipe.inference import resolve_inference
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


@pytest.mark.parametrize("to, group", [("int8", 16), ("int8", 32), ("int4", 16)])
def test_a_window_in_fewer_bits(directory, tmp_path, to, group):
    """As `quantized`, until the window is full; and after it, as `quantized` of a model whose window is its own."""
    fewer, settings = {"to": to, "group": group, "block_size": 4}, {"max_tokens": 16, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    generator = torch.Generator().manual_seed(2)
    asked = [torch.randint(tokens.FIRST, VOCABULARY, (length,), generator=generator).tolist() for length in (3, 30, 1, 44)]
    save("mistral-window", tmp_path / "windows")
    tokens.save(tmp_path / "windows", VOCABULARY)
    shutil.copytree(tmp_path / "windows", tmp_path / "whole")
    config = json.loads((tmp_path / "whole/config.json").read_text())
    (tmp_path / "whole/config.json").write_text(json.dumps({**config, "sliding_window": None}))
    ways = ((directory, directory, 64, 4), (tmp_path / "windows", tmp_path / "whole", config["sliding_window"], 0))
    for bounded, model, window, sinks in ways:
        expected = fw.LLM(bounded, dtype="fp32", kv_cache={"name": "quantized", **fewer})
        found = fw.LLM(model, dtype="fp32", kv_cache={"name": "sliding_window", "window": window, "sinks": sinks, **fewer})
        assert found.engine.reads.token_bytes == expected.engine.reads.token_bytes
        for one, other in zip(found.generate(asked, **settings), expected.generate(asked, **settings), strict=True):
            assert (one.token_ids, one.logprobs) == (other.token_ids, pytest.approx(other.logprobs, abs=1e-5))


@pytest.mark.parametrize("to, bytes_of_row", [(None, 2 * 64), ("int8", 64 + 2 * 2), ("int4", 32 + 4 * 2), ("fp8", 64 + 4)])
def test_bytes_of_a_token_in_a_window(to, bytes_of_row):
    """Of a head of 64 numbers, in groups of 32: codes, and a scale of 2 bytes for each; step and smallest number of 2 each; one of 4."""
    cache, shapes = make(KVCachePlugin, "sliding_window", to=to), [KVShape(3, 64), KVShape(3, 64)]
    assert cache.token_bytes(shapes, torch.bfloat16) == 2 * 2 * 3 * bytes_of_row
    if to is not None:
        assert cache.token_bytes(shapes, torch.bfloat16) == make(KVCachePlugin, "quantized", to=to).token_bytes(shapes, torch.bfloat16)


def test_a_plan_has_room_for_more_of_a_window_in_fewer_bits(directory):
    def planned(*words):
        cache = ["kv_cache=sliding_window", "kv_cache.window=32", "inference.device=cpu", "inference.dtype=fp32", *words]
        return plan_generation(directory, resolve_inference(overridden(Config("test", {}, {}), cache))).largest.at_peak["kv"]

    head = KVShape(1, json.loads((directory / "config.json").read_text())["head_dim"])
    row = make(KVCachePlugin, "quantized").token_bytes([head], torch.float32) / (2 * head.head_dim)
    assert planned("kv_cache.to=int8") == pytest.approx(planned() * row / 4)


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


@pytest.mark.parametrize("draft", [False, True])
def test_long_prompts_by_a_few_tokens_in_little_room(directory, draft):
    """A step adds to a sequence what its pieces are, so that it has room however many tokens a step has."""
    kept = {"name": "sliding_window", "window": 8, "sinks": 2, "block_size": 2}
    options = {"draft": str(directory), "speculate": 24} if draft else {}
    llm = fw.LLM(directory, dtype="fp32", kv_cache=kept, max_sequences=2, step_tokens=256, prompt_tokens=2, **options)
    caches = [llm.engine.scheduler.cache, *([llm.engine.guesser.cache] if draft else [])]
    asked = [list(range(10, 60)), list(range(12, 62))]
    together = llm.generate(asked, max_tokens=20, temperature=0, ignore_eos=True)
    assert [len(result.token_ids) for result in together] == [20, 20] and not llm.engine.scheduler.preemptions
    assert all(cache.capacity >= llm.engine.context for cache in caches)


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
    with pytest.raises(UserError, match=r"kv_cache\.to: fp8 needs a GPU of compute capability 8\.9 or more; int8"):
        fw.LLM(directory, kv_cache={"name": "sliding_window", "to": "fp8"}, device="cpu")
    with pytest.raises(UserError, match=r"kv_cache\.group: 20 is no multiple of 16"):
        fw.LLM(directory, kv_cache={"name": "sliding_window", "to": "int8", "group": 20})
    with pytest.raises(UserError, match=r"kv_cache\.group: 64 is of int8 and int4, and kv_cache\.to asks for neither; set"):
        fw.LLM(directory, kv_cache={"name": "sliding_window", "group": 64})
    with pytest.raises(UserError, match=r"kv_cache\.window: 0 is too small; the least is 1"):
        fw.LLM(directory, kv_cache={"name": "sliding_window", "window": 0})
