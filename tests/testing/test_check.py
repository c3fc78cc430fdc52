"""`fw plugins check`: a line for each test, a verdict, and an exit code."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import serving


def test_a_plugin_that_passes(fw) -> None:
    ended = fw("plugins", "check", "schedule", "constant").ok()
    assert "ok  it pickles nothing" in ended.out and "Constant passes: " in ended.out and "NO " not in ended.out


def test_one_that_cannot_be_used_and_one_that_is_none(fw) -> None:
    if importlib.util.find_spec("flash_attn") is None:
        ended = fw("plugins", "check", "attention", "flash_attn")
        assert ended.code == 1 and "pip install" in ended.out and "not usable" in ended.out
    ended = fw("plugins", "check", "schedule", "constnat")
    assert ended.code == 2 and "did you mean 'constant'?" in ended.err
    assert fw("plugins", "check", "nonsense").code == 2


def test_options_of_files_here(fw, workspace) -> None:
    """Of files in the directory where it is asked for."""
    Path("texts.jsonl").write_text("".join(json.dumps({"text": f"this is the text of number {n}. " * 3}) + "\n" for n in range(60)))
    serving.make_model(Path("base"), hidden_size=32, intermediate_size=64)
    ended = fw("plugins", "check", "data", "jsonl")
    assert ended.code == 1 and "no files given" in ended.out
    fw("plugins", "check", "data", "jsonl", "data.files=[texts.jsonl]", "data.tokenizer=base").ok()
    ended = fw("plugins", "check", "data", "jsonl", "data.nonsense=1")
    assert ended.code == 1 and "nonsense" in ended.out
