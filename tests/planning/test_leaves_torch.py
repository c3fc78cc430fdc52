"""A plan leaves the process as it was: what others make afterwards is right."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

AFTER_A_PLAN = """
import sys
from pathlib import Path

import fw
from fw.planning.ask import plan

plan(Path(sys.argv[1]), "inference.max_sequences=2", "inference.kv_budget=1MiB", device="h100-80gb")
import torch

with torch.device("meta"):
    assert torch.tensor([1.0]).is_meta and torch.zeros(()).is_meta and torch.get_default_device() == torch.device("meta")
from transformers import AutoModelForCausalLM

print(AutoModelForCausalLM.from_pretrained(sys.argv[2]).model.rotary_emb.inv_freq.tolist())
"""


def test_transformers_loads_as_before(tmp_path):
    """In a fresh process, in which a plan for a GPU is the first that asks torch for a device context."""
    shape = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=128, max_position_embeddings=64, **shape)).save_pretrained(tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    planned = tmp_path / "planned"
    planned.mkdir()
    (planned / "config.json").write_text(json.dumps(told))
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", AFTER_A_PLAN, planned, tmp_path], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout.splitlines()[-1]) == pytest.approx((10000.0 ** -(torch.arange(0, 12, 2) / 12)).tolist(), rel=1e-5)
