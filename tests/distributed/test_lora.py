"""LoRA under every way to divide a run against one process, and what a rank keeps of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conftest import column, fw
from distributed.operators import HAS_COMPILER
from distributed.ranks import run_ranks

STEPS = 6
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
SENSITIVE = {"fp32": 1e-5, "bf16": 2e-1}
"""Of what chooses by its parameters, or divides by norms that begin at zero: fsdp rounds them to bf16 before, one process afterwards."""
LORA = "peft={name: lora, rank: 4, targets: [all-linear, lm_head]}"
ONE = {
    "lora": [LORA],
    "dora": ["peft={name: dora, rank: 4}"],
    "nf4": ["peft={name: lora, rank: 4}", "quantization=nf4"],
    "ia3": ["peft=ia3"],
    "adapter": ["peft={name: adapter, size: 4}"],
    "prompt": ["peft={name: prompt, tokens: 4}"],
    "prefix": ["peft={name: prefix, tokens: 4}"],
    "hf_peft": ["peft={name: hf_peft, type: LOKR, config: {r: 4}}"],
    "buffers": ["peft={name: hf_peft, type: OFT, config: {oft_block_size: 8}}"],
    "frozen": ["peft={name: hf_peft, type: VERA, config: {r: 8, d_initial: 0.5}}"],
    "bank": ["peft={name: hf_peft, type: VBLORA, config: {r: 4, num_vectors: 16, vector_length: 8}}"],
    "columns": ["peft={name: hf_peft, type: DELORA, config: {r: 4}}"],
    "entries": ["peft={name: hf_peft, type: SHIRA, config: {r: 4}}"],
    "decomposed": ["peft={name: hf_peft, type: PSOFT, config: {r: 4}}"],
    "places": ["peft={name: hf_peft, type: SUPERTUNING, config: {sparsity: 0.9, save_precomputed_indices: false}}"],
    "own": ["peft={name: hf_peft, type: LN_TUNING}"],
    "norms": ["peft={name: hf_peft, type: LORA, config: {r: 4, use_dora: true}}"],
}
"""What is divided; the first of a cell's words that is here says which."""
CELLS: dict[str, list[str]] = {
    "lora ddp": ["sharding=ddp"],
    "dora ddp": ["sharding=ddp"],
    "nf4 ddp": ["sharding=ddp"],
    "lora fsdp": ["sharding=fsdp"],
    "dora fsdp": ["sharding=fsdp"],
    "nf4 fsdp": ["sharding=fsdp"],
    "nf4 fsdp, recomputed": ["sharding=fsdp", "activation=full"],
    "lora fsdp, chunked loss": ["sharding=fsdp", "objective.chunk_tokens=16"],
    "lora fsdp tensor 2": ["sharding=fsdp", "sharding.tensor=2", "train.micro_batch_size=4"],
    "lora fsdp context 2": ["sharding=fsdp", "sharding.context=2", "train.micro_batch_size=4"],
    "lora zero 1": ["sharding=zero", "sharding.stage=1"],
    "nf4 zero 1": ["sharding=zero", "sharding.stage=1"],
    "lora zero 2": ["sharding=zero", "sharding.stage=2"],
    "dora zero 2": ["sharding=zero", "sharding.stage=2"],
    "nf4 zero 2": ["sharding=zero", "sharding.stage=2"],
    "ia3 fsdp tensor 2": ["sharding=fsdp", "sharding.tensor=2", "train.micro_batch_size=4"],
    "ia3 zero 2": ["sharding=zero", "sharding.stage=2"],
    "adapter fsdp": ["sharding=fsdp"],
    "adapter zero 3": ["sharding=zero", "sharding.stage=3"],
    "prompt fsdp": ["sharding=fsdp"],
    "prompt zero 3": ["sharding=zero", "sharding.stage=3"],
    "prefix fsdp, recomputed": ["sharding=fsdp", "activation=full"],
    "prefix zero 3, recomputed": ["sharding=zero", "sharding.stage=3", "activation=full"],
    "hf_peft fsdp": ["sharding=fsdp"],
    "hf_peft zero 2": ["sharding=zero", "sharding.stage=2"],
    "buffers fsdp": ["sharding=fsdp"],
    "buffers zero 2": ["sharding=zero", "sharding.stage=2"],
    "norms fsdp": ["sharding=fsdp"],
    "frozen ddp": ["sharding=ddp"],
    "frozen fsdp": ["sharding=fsdp"],
    "frozen zero 2": ["sharding=zero", "sharding.stage=2"],
    "bank ddp": ["sharding=ddp"],
    "bank fsdp": ["sharding=fsdp"],
    "bank fsdp, recomputed": ["sharding=fsdp", "activation=full"],
    "bank zero 2": ["sharding=zero", "sharding.stage=2"],
    "columns fsdp": ["sharding=fsdp"],
    "entries fsdp": ["sharding=fsdp"],
    "entries zero 2": ["sharding=zero", "sharding.stage=2"],
    "decomposed fsdp": ["sharding=fsdp"],
    "decomposed zero 2": ["sharding=zero", "sharding.stage=2"],
    "places ddp": ["sharding=ddp"],
    "places fsdp": ["sharding=fsdp"],
    "places zero 2": ["sharding=zero", "sharding.stage=2"],
    "own fsdp tensor 2": ["sharding=fsdp", "sharding.tensor=2", "train.micro_batch_size=4"],
    "own zero 3": ["sharding=zero", "sharding.stage=3"],
    "lora zero 3": ["sharding=zero", "sharding.stage=3"],
    "lora zero 3, on the host": ["sharding=zero", "sharding.stage=3", "offload.optimizer=cpu", "offload.params=cpu"],
}
RANKS = 2


def directory(cell: str, precision: str) -> str:
    return f"{cell} {precision}".replace(" ", "-")


def train_in_turn(cells: list[str]) -> None:
    shared = [f"train.max_steps={STEPS}", f"train.save_every={STEPS}", "launch.threads=1"]
    overrides = [
        [*ONE[cell.split()[0]], *CELLS[cell], *shared, f"precision={precision}", f"train.run_dir={directory(cell, precision)}"]
        for cell in cells
        for precision in TOLERANCE
    ]
    run_ranks("train_in_turn.py", RANKS, overrides)


def adapters(run: str | Path) -> dict[str, torch.Tensor]:
    return load_file(Path(run) / "checkpoints" / "latest" / "adapter_model.safetensors")


@pytest.mark.slow
def test_every_division_equals_one_process(workspace: Path) -> None:
    for precision in TOLERANCE:
        for name, what in ONE.items():
            shared = (f"precision={precision}", f"train.max_steps={STEPS}", f"train.save_every={STEPS}", "train.micro_batch_size=4")
            fw("train", "tiny.yaml", *what, *shared, f"train.run_dir=one-{name}-{precision}").ok()
    cells = [cell for cell in CELLS if "host" not in cell or HAS_COMPILER]
    train_in_turn(cells)
    for cell in cells:
        for precision, tolerance in (SENSITIVE if cell.startswith(("bank", "columns")) else TOLERANCE).items():
            one = f"one-{cell.split()[0]}-{precision}"
            for name in ("loss", "grad_norm"):
                pairs = list(zip(column(one, name), column(directory(cell, precision), name), strict=True))
                assert len(pairs) == STEPS
                worst = max(abs(a - b) / abs(a) for a, b in pairs)
                assert worst <= tolerance, f"{cell} in {precision}: {name} differs by {worst}"
            if precision == "fp32":
                expected, found = adapters(one), adapters(directory(cell, precision))
                assert expected.keys() == found.keys()
                for name, tensor in found.items():
                    assert torch.allclose(tensor, expected[name], rtol=1e-3, atol=1e-5), f"{cell}: {name}"


def test_what_is_frozen_stays_bit_for_bit(workspace: Path) -> None:
    """With weight decay and clipping, against the files; the parameters as ranks hold them when training has ended."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(vocab_size=40, **sizes)).save_pretrained("base")
    shared = [
        "model={name: auto, path: base}",
        "data={name: synthetic, vocab_size: 40, samples: 16}",
        "optimizer={name: adamw, lr: 1e-2, weight_decay: 0.1}",
        "train.gradient_clip_norm=0.05",
        "train.sequence_length=16",
        "train.max_steps=3",
        "launch.threads=1",
    ]
    methods = {"lora": "peft={name: lora, whole: [norm, lm_head]}", "dora": "peft=dora"}
    runs = {
        1: [[method, *shared, f"train.run_dir=one-{name}"] for name, method in methods.items()],
        RANKS: [
            [method, *shared, f"sharding={sharding}", f"train.run_dir={sharding}-{name}"]
            for name, method in methods.items()
            for sharding in ("ddp", "fsdp")
        ],
    }
    for ranks, each in runs.items():
        run_ranks("frozen.py", ranks, {"base": "base", "runs": each})


@pytest.mark.parametrize("sharding, ranks", [("single", 1), ("fsdp", 2)])
def test_gradients_and_optimizer_are_the_adapters_own(workspace: Path, sharding: str, ranks: int) -> None:
    shared = ["train.max_steps=2", "train.save_every=2", "memory.measure_step=2", f"sharding={sharding}", f"launch.devices={ranks}"]
    fw("train", "tiny.yaml", LORA, *shared).ok()
    sizes = [tensor.numel() * 4 for tensor in adapters("run").values()]
    counts = 4 * len(sizes)  # AdamW's of each parameter's steps
    most = [rank["components_max"] for rank in json.loads(Path("run/memory.json").read_text())["per_rank"]]
    assert len(most) == ranks
    assert sum(rank["optimizer_bytes"] for rank in most) == 2 * sum(sizes) + ranks * counts
    for rank in most:  # and one that is about to be added to that of the micro-batch before, or a unit's that are about to be divided
        assert rank["gradients_bytes"] <= sum(sizes) / ranks + (max(sizes) if ranks == 1 else sum(sizes))
