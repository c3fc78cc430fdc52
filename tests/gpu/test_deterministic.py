"""`train.deterministic` on a GPU: the same bits twice."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from conftest import column, fw

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CASES = {
    "bf16": ["precision=bf16"],
    "recomputed, 8-bit state": ["precision=bf16_true", "activation=full", "optimizer=adamw_8bit"],
    "LoRA": ["precision=bf16", "peft={name: lora, targets: [all-linear]}"],
}


def _digests(run: str) -> dict[str, str]:
    files = Path(run, "checkpoints/latest").resolve().glob("*.safetensors")
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.parametrize("case", CASES)
def test_two_runs_are_the_same_to_the_bit(workspace: Path, case: str) -> None:
    words = ["tiny.yaml", "launch.accelerator=cuda", "train.deterministic=true", "train.max_steps=6", "train.save_every=6", *CASES[case]]
    for name in ("one", "two"):
        fw("train", *words, f"train.run_dir={name}").ok()
    assert column("one", "loss") == column("two", "loss") and column("one", "grad_norm") == column("two", "grad_norm")
    assert _digests("one") == _digests("two") != {}
