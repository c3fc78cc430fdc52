"""What 4 bits take of a Llama of 336 M parameters, to keep and to load; and that `tools/bench qlora` fails where it is more."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import environment
from fw.kinds import make
from fw.kinds.model import ModelPlugin
from fw.kinds.quantization import QuantizationPlugin
from fw_plugins.attention.sdpa import SDPAttention

pytest.importorskip("bitsandbytes")
BENCHES = Path(__file__).parent.parent.parent / "tools" / "benches"
sys.path.append(str(BENCHES))  # where the benches find each other

import qlora  # noqa: E402
import random_llama  # noqa: E402


def test_codes_and_scales_are_a_quarter_of_16_bits() -> None:
    """Of the shape itself, without its bytes: 0.25 of codes, a byte of scale for 64 weights, and 4 for 256 of these."""
    sizes = {name: value for name, value in qlora.BASE["model"].items() if name not in ("name", "vocab_size")}
    plugin = make(ModelPlugin, "llama", **sizes)
    with torch.device("meta"):
        model = plugin.build(32_000, 256, SDPAttention(None)).to(torch.bfloat16)
        dense = {name: parameter.nbytes for name, parameter in model.named_parameters()}
        quantized = make(QuantizationPlugin, "nf4").apply(model, torch.bfloat16)
    kept = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    assert sum(dense.values()) == 2 * 336_118_784 and len(quantized) == 24 * 7
    of_linears = sum(kept[part] for weight in quantized.values() for part in weight.kept)
    weights = sum(dense[name] for name in quantized) // 2
    assert of_linears == weights // 2 + weights // 64 + 4 * weights // 64 // 256 + 4 * len(quantized)
    assert of_linears / (2 * weights) <= qlora.LINEARS_MOST == 0.26
    assert sum(kept.values()) / sum(dense.values()) <= qlora.MODEL_MOST == 0.41


def test_loading_takes_what_stays_and_a_tensor(tmp_path: Path) -> None:
    """A third of the blocks, of the same sizes, and half of the tokens; in a process of its own."""
    random_llama.make(tmp_path, random_llama.Shape(layers=8, vocabulary=16_000))
    words = [sys.executable, "-c", qlora.LOADING, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, env={**environment(), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["linears"] / found["linears_bf16"] <= 0.26 and found["largest"] == 2 * 16_000 * 1024
    assert 0.95 * found["model"] < found["growth"], "the measurement must see what stays"
    assert found["growth"] <= 1.3 * found["model"] + found["largest"], found


GOOD: dict[str, Any] = {
    "bytes": {"linears": 26, "linears_bf16": 100, "model": 41, "model_bf16": 100, "growth": 58, "largest": 5},
    "runs": {
        "lora": {"smooth": [(8, 3.0), (9, 2.0)], "val": [(9, 2.0)]},
        "qlora": {"smooth": [(8, 3.1), (9, 2.05)], "val": [(9, 2.09)]},
    },
}


@pytest.mark.parametrize(
    "place, value, words",
    [
        (("bytes", "linears"), 27, "linears: 0.2700 of the bytes"),
        (("bytes", "model"), 42, "model: 0.4200 of the bytes"),
        (("bytes", "growth"), 59, "loading: 59 B, and 58 B"),
        (("runs", "lora", "smooth"), [(8, 2.0), (9, 2.0)], "lora: its loss does not fall"),
        (("runs", "qlora", "smooth"), [(8, 3.0), (9, 2.2)], "qlora: its loss is 10.00% from"),
        (("runs", "qlora", "val"), [(9, 1.8)], "qlora: its loss is 10.00% from"),
    ],
)
def test_a_bound_that_does_not_hold_is_said(place: tuple[str, ...], value: object, words: str) -> None:
    assert qlora.broken(GOOD) == []
    found = copy.deepcopy(GOOD)
    inner = found
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    assert any(said.startswith(words) for said in qlora.broken(found))


def test_the_bench_ends_with_1_where_one_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"step": str(step), "loss": "3.0", "val_loss": "3.0"} for step in range(1, 9)]
    loaded = {**GOOD["bytes"], "parameters": 1}
    monkeypatch.setattr(qlora, "train", lambda *given: rows)
    monkeypatch.setattr(qlora.subprocess, "run", lambda *given, **more: subprocess.CompletedProcess(given, 0, json.dumps(loaded)))
    monkeypatch.setattr(sys, "argv", ["qlora", "--out", str(tmp_path), "--steps", "8"])
    with pytest.raises(SystemExit) as ended:
        qlora.main()
    assert "lora: its loss does not fall" in str(ended.value.code) and (tmp_path / "qlora.md").exists()
