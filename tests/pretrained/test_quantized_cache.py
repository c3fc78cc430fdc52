"""What keys and values in fewer bits cost a model that has learnt something."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import fw
from fw.locate import find
from fw.pretrained.calibration import calibration_text


def test_perplexity(trained: Path) -> None:
    """Of what prompts say, through each cache; and bytes of a token, by what is taken for so many."""
    text = calibration_text(["python-docs"], find(str(trained)), 1, 16, 128, lambda said: None)
    rows = [row[:127] for row in text.held_out_ids_ML.tolist()]

    def perplexity(cache: str | dict) -> tuple[float, float]:
        llm = fw.LLM(trained, dtype="bf16", kv_cache=cache, max_context=128, step_tokens=100)
        results = llm.generate(rows, max_tokens=1, temperature=0, prompt_logprobs=0)
        told = [logprob for result in results for logprob in result.prompt_logprobs]
        assert len(told) == 16 * 126
        llm.engine.add("long", rows[0][:97], llm.sampling(max_tokens=20))
        before = llm.engine.scheduler.cache.live_bytes
        while not llm.engine.scheduler.running or llm.engine.scheduler.running[0].computed < 97:
            llm.engine.step()
        taken = llm.engine.scheduler.cache.live_bytes - before
        return math.exp(-sum(told) / len(told)), taken

    heads, dim, blocks = 2, 16, 3
    plain, taken = perplexity({"name": "paged", "reuse_prefixes": False})
    assert plain < 80 and taken == 112 * blocks * heads * 2 * (2 * dim)
    eight, taken = perplexity({"name": "quantized", "reuse_prefixes": False})
    assert taken == 112 * blocks * heads * 2 * (dim + 2) and eight == pytest.approx(plain, rel=1e-3)
    four, taken = perplexity({"name": "quantized", "to": "int4", "reuse_prefixes": False})
    assert taken == 112 * blocks * heads * 2 * (dim // 2 + 2 * 4) and four == pytest.approx(plain, rel=0.02)
    assert eight != plain and four != eight
