"""Every architecture under fsdp on two ranks, from transformers' files and back to them; and one that fw does not implement."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import fw
from conftest import environment
from distributed.ranks import ends
from models.architectures import save

CASES = [
    "llama-biases-head_dim",
    "mistral-window",
    "qwen2-windows-tied",
    "qwen3",
    "gemma2",
    "gemma3",
    "gpt2",
    "mixtral",
    "qwen3_moe-mixed",
]
UNKNOWN = {
    "hf-gpt_neox": {"rotary_pct": 0.5},
    "hf-starcoder2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "hf-olmoe": {"num_experts": 5, "num_experts_per_tok": 2},
}


def make_unknown(name: str, directory: Path) -> None:
    """A tiny model of a family that no plugin but ``hf`` reads."""
    shape = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = AutoConfig.for_model(name.removeprefix("hf-"), **shape, **UNKNOWN[name], bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


@pytest.mark.slow
def test_trains_under_fsdp_and_comes_back(workspace):
    directories = {case: Path(case) for case in [*CASES, *UNKNOWN]}
    for case, directory in directories.items():
        make_unknown(case, directory) if case in UNKNOWN else save(case, directory)
    program = Path(__file__).with_name("train_architectures.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(program), *map(str, directories.values())]
    done = subprocess.run(torchrun, capture_output=True, text=True, env=environment(), timeout=600)
    assert done.returncode == 0, ends(done.stderr)
    for case, directory in directories.items():
        trained = directory / "trained" / "latest"
        theirs = AutoModelForCausalLM.from_pretrained(trained, attn_implementation="eager").eval()
        before = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
        ids = torch.arange(1, 21)[None]
        logits = theirs(ids).logits
        assert (logits - before(ids).logits).abs().max() > 1e-3, case  # the trained weights, not the first ones
        if case not in UNKNOWN:
            torch.testing.assert_close(fw.load_model(trained)(ids), logits, atol=1e-4, rtol=0)
