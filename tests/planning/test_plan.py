"""Plans of single processes against the same steps measured, and the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from conftest import TINY, fw
from fw.meter.document import COMPONENTS, MemoryDocument
from fw.planning.plan import plan
from fw_plugins.sharding import offloaded

SYNTHETIC = ["data={name: synthetic, vocab_size: 300, samples: 64}", "train.global_batch_size=8"]
CASES = {
    "fp32": ["precision=fp32"],
    "bf16, micro-batches": ["precision=bf16", "train.micro_batch_size=2"],
    "bf16_true, adamw_bf16, full": ["precision=bf16_true", "optimizer=adamw_bf16", "activation=full"],
    "chunked loss, tied": ["objective.chunk_tokens=64", "model.tie_word_embeddings=true"],
    "tied, few tokens": [
        "model.tie_word_embeddings=true",
        "model.hidden_size=256",
        "train.global_batch_size=1",
        "train.micro_batch_size=1",
        "train.sequence_length=8",
    ],
    "tied, few tokens, bf16": [
        *(
            "model.tie_word_embeddings=true",
            "model.hidden_size=256",
            "train.global_batch_size=1",
            "train.micro_batch_size=1",
            "train.sequence_length=8",
        ),
        "precision=bf16",
    ],
    "adamw_8bit, few tokens": [
        *(
            "optimizer=adamw_8bit",
            "model.hidden_size=256",
            "train.global_batch_size=1",
            "train.micro_batch_size=1",
            "train.sequence_length=8",
        )
    ],
    "selective, adamw_8bit": ["activation=selective", "optimizer=adamw_8bit", "train.micro_batch_size=4"],
    "sqrt, lion": ["activation=sqrt", "optimizer=lion", "model.num_hidden_layers=4"],
    "in backward": ["train.micro_batch_size=8", "optimizer.in_backward=true", "train.gradient_clip_norm=0"],
    "optimizer in files": ["offload={optimizer: nvme, path: away}"],
    "average": ["train.ema_decay=0.9"],
    "average of bf16": ["train.ema_decay=0.9", "precision=bf16_true"],
    "eager": ["attention=eager"],
    "gpt2": ["model={name: gpt2, n_layer: 2, n_head: 4, n_embd: 64}"],
    "experts": [
        "model={name: mixtral, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,"
        " intermediate_size: 96, num_local_experts: 4}"
    ],
    "phased": ["precision={name: phased, phases: [{from_step: 0, compute: bf16}, {from_step: 2, compute: fp32}]}"],
    "packed": ["data={name: synthetic, vocab_size: 300, samples: 64, min_length: 8}", "train.packing=true"],
    "lora, bf16": ["peft={name: lora, rank: 4}", "precision=bf16", "train.micro_batch_size=2"],
    "dora, dropout, head": ["peft={name: dora, targets: [all-linear, lm_head], dropout: 0.1}", "activation=full"],
    "lora, embedding, chunked loss": ["peft={name: lora, targets: [embed_tokens, q_proj]}", "objective.chunk_tokens=64"],
    "ia3, bf16": ["peft={name: ia3, targets: [k_proj, down_proj]}", "precision=bf16"],
    "bottlenecks, full": ["peft={name: adapter, size: 8}", "activation=full"],
    "virtual tokens": ["peft={name: prompt, tokens: 5}", "precision=bf16", "train.micro_batch_size=2"],
    "keys and values of virtual tokens": ["peft={name: prefix, tokens: 5}", "precision=bf16", "train.micro_batch_size=2"],
    "peft's own": ["peft={name: hf_peft, type: LOHA, config: {r: 4}}", "precision=bf16"],
    "peft's own, with buffers": ["peft={name: hf_peft, type: OFT, config: {oft_block_size: 8}}", "precision=bf16"],
    "peft's own, from weights": ["peft={name: hf_peft, type: SUPERTUNING, config: {sparsity: 0.9, r: 4, lora_alpha: 8}}", "precision=bf16"],
    "norms alone": ["peft={name: hf_peft, type: LN_TUNING}", "precision=bf16"],
    "nf4, lora, bf16": ["quantization=nf4", "peft={name: lora, rank: 4}", "precision=bf16"],
    "nf4 in fp32, lora, bf16": ["quantization={name: nf4, compute_dtype: fp32}", "peft={name: lora, rank: 4}", "precision=bf16"],
    "fp4, lora, full": ["quantization={name: fp4, double_quantization: false}", "peft={name: lora, rank: 4}", "activation=full"],
    "padded": ["data={name: synthetic, vocab_size: 300, samples: 8, min_length: 8}"],
}
SLACK = 1024
"""Bytes: losses that are kept until they are logged, numbers that operators make for themselves."""


@pytest.mark.parametrize("case", ["fp32", "bf16, micro-batches", "packed", "eager", "lora, bf16", "chunked loss, tied", "gpt2"])
def test_the_run_takes_what_was_planned_by_operators_of_torch(workspace: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FW_TRAINING_KERNELS", "off")
    test_the_run_takes_what_was_planned(workspace, case)


@pytest.mark.parametrize("case", CASES)
def test_the_run_takes_what_was_planned(workspace: Path, case: str) -> None:
    overrides = [*SYNTHETIC, *CASES[case]]
    measured = MemoryDocument.from_json(json.loads(fw("profile", "tiny.yaml", "--json", *overrides).ok().out)).largest
    planned = plan("tiny.yaml", *overrides).largest
    assert measured.allocated_peak == pytest.approx(planned.allocated_peak, abs=SLACK)
    assert planned.peak_phase == measured.peak_phase
    for component in COMPONENTS:
        slack = 0 if component in ("parameters", "gradients", "optimizer") else SLACK
        assert measured.most[component] == pytest.approx(planned.most[component], abs=slack), component
        assert measured.at_peak.get(component, 0) == pytest.approx(planned.at_peak.get(component, 0), abs=slack), component


def test_blocks_that_are_recomputed_keep_their_input_alone(workspace: Path) -> None:
    """And where the generator stood; in bf16, too, no copies of weights."""
    shared = [*SYNTHETIC, "activation=full", "precision=bf16", "train.micro_batch_size=1", "train.global_batch_size=1"]
    few, many = (plan("tiny.yaml", *shared, f"model.num_hidden_layers={layers}").largest for layers in (3, 13))
    tokens = TINY["train"]["sequence_length"]
    a_block = tokens * TINY["model"]["hidden_size"] * 4 + torch.get_rng_state().nbytes
    assert many.most["activations"] - few.most["activations"] == 10 * a_block


def test_json_is_all_that_is_on_stdout_and_adds_up(workspace: Path) -> None:
    for verb in ("plan", "profile"):
        done = fw(verb, "tiny.yaml", "--json", *SYNTHETIC).ok()
        document = json.loads(done.out)
        assert list(document) == ["config", "device", "world_size", "fits", "budget_bytes", "per_rank", "step_time_s"]
        (rank,) = document["per_rank"]
        assert sum(rank["components_at_peak"].values()) == rank["allocated_peak_bytes"] >= rank["allocated_peak_low_bytes"] > 0
        assert list(rank["components_max"]) == [f"{name}_bytes" for name in COMPONENTS]
        assert MemoryDocument.from_json(document).as_json() == document
    assert document["step_time_s"] > 0


def test_a_budget_decides_what_fits(workspace: Path) -> None:
    assert fw("plan", "tiny.yaml", "memory.budget=1MiB", *SYNTHETIC).ok().out.rstrip().endswith("too much")
    assert fw("plan", "tiny.yaml", "memory.budget=1MiB", "--strict", *SYNTHETIC).code == 3
    assert fw("plan", "tiny.yaml", "memory.budget=1GiB", "--strict", *SYNTHETIC).code == 0


def test_ranks_are_as_many_as_asked_for(workspace: Path) -> None:
    wide = ["data={name: synthetic, vocab_size: 300}", "train.global_batch_size=64", "sharding=fsdp"]
    document = json.loads(fw("plan", "tiny.yaml", "--world-size", "32", "--json", *wide).ok().out)
    assert document["world_size"] == 32 and [rank["rank"] for rank in document["per_rank"]] == list(range(32))
    one = plan("tiny.yaml", *wide, "train.global_batch_size=2").largest
    divided = document["per_rank"][0]["components_max"]
    assert divided["optimizer_bytes"] == pytest.approx(one.most["optimizer"] / 32, rel=0.05)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--world-size", "0"], "--world-size"),
        (["sharding=fsdp", "--world-size", "3"], "global_batch_size"),
        (["train.sequence_lenght=3"], "sequence_length"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_sentence(workspace: Path, arguments: list[str], words: str) -> None:
    done = fw("plan", "tiny.yaml", *arguments)
    assert done.code == 2 and words in done.err and "Traceback" not in done.err


def test_a_profile_of_no_steps_is_refused(workspace: Path) -> None:
    done = fw("profile", "tiny.yaml", "--steps", "0")
    assert done.code == 2 and "--steps" in done.err


@pytest.mark.parametrize("sharding", ["single", "ddp", "fsdp"])
def test_a_plan_writes_no_optimizer_to_files(workspace: Path, monkeypatch: pytest.MonkeyPatch, sharding: str) -> None:
    """Of a machine with another disk: what the run would reserve there, the plan's may not have."""

    def written(*arguments: object) -> None:
        raise AssertionError("a plan has nothing to write")

    monkeypatch.setattr(offloaded.os, "posix_fallocate", written)
    words = ["offload={optimizer: nvme, path: away}", f"sharding={sharding}", f"launch.devices={1 if sharding == 'single' else 2}"]
    found = plan("tiny.yaml", *SYNTHETIC, *words)
    assert found.per_rank[0].most["optimizer"] < 1024 < found.per_rank[0].most["parameters"]
