"""Runs on a mesh of several dimensions: how they begin, and that they go on under another division."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from conftest import column, environment, fw
from distributed.ranks import ends

MESHES = ["ddp", "fsdp", "{name: fsdp, replicate: 2}", "{name: fsdp, tensor: 2}", "{name: fsdp, context: 2, tensor: 2}"]


def test_initial_weights_do_not_depend_on_the_division(workspace):
    program = str(Path(__file__).with_name("initial_weights.py"))
    for ranks, meshes in ((2, MESHES[:4]), (4, MESHES)):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), program, *meshes]
        done = subprocess.run(torchrun, capture_output=True, text=True, env=environment(), timeout=300)
        assert done.returncode == 0, ends(done.stderr)


def test_options_of_ddp_and_fsdp_do_what_they_say(workspace):
    program = str(Path(__file__).with_name("options.py"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", program]
    done = subprocess.run(torchrun, capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == 0, ends(done.stderr)


def test_a_run_goes_on_under_another_division(workspace):
    """Tensor × shard on four ranks, then context on two, then one; each from the checkpoint before it."""
    keep = ("train.save_every=3", "train.micro_batch_size=2")
    fw("train", "tiny.yaml", "train.max_steps=9", "train.run_dir=whole", *keep).ok()
    fw("train", "tiny.yaml", "train.max_steps=3", *keep, "sharding={name: fsdp, tensor: 2}", "launch.devices=4").ok()
    fw("train", "tiny.yaml", "train.max_steps=6", *keep, "sharding={name: fsdp, context: 2}", "launch.devices=2", "resume=auto").ok()
    fw("train", "tiny.yaml", "train.max_steps=9", *keep, "resume=auto").ok()
    for name in ("loss", "grad_norm"):
        found, expected = column("run", name), column("whole", name)
        assert len(found) == len(expected) == 9
        assert max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)) < 1e-5
    written = AutoModelForCausalLM.from_pretrained("run/checkpoints/step-00000003")
    whole = AutoModelForCausalLM.from_pretrained("whole/checkpoints/step-00000003")
    for (name, a), b in zip(written.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4, msg=name)


def test_a_model_without_a_plan_is_refused_before_any_rank_starts(workspace):
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    shape = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    GPTNeoXForCausalLM(GPTNeoXConfig(**shape, bos_token_id=0, eos_token_id=0)).save_pretrained("neox")
    for dimension, says in (("tensor", "has no plan for dividing its layers"), ("context", "because its attention is not a plugin's")):
        done = fw("train", "tiny.yaml", "model={name: hf, path: neox}", f"sharding={{name: fsdp, {dimension}: 2}}", "launch.devices=2")
        assert done.code == 2 and says in done.err and not Path("run").exists()
