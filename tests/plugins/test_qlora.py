"""configs/qlora.yaml as it is, on a small model: what it says is on, losses are transformers' own, and LoRA over bf16 learns the same."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from conftest import REPOSITORY, column
from fw.assemble import Assembly
from fw.cli import main
from fw.kinds.data import IGNORED
from fw.locate import find
from fw_plugins.objective.causal_lm import CausalLMObjective
from fw_plugins.peft.lora_layers import LoraLinear
from fw_plugins.quantization.coded import CodedLinear
from live import assemblies

pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers")

STEPS, ROWS, LENGTH = 3, 16, 512
CONFIG = str(REPOSITORY / "configs/qlora.yaml")
OWN = ["model.path=base", "data.source=files", "data.files=[notes/*.md]"]
"""What the config's first lines tell to give."""


class Ran(NamedTuple):
    """A run of one rank in this process."""

    assembly: Assembly
    batches: list[Mapping[str, torch.Tensor]]
    forwards: int
    """Of a layer, in training."""
    said: str


@pytest.fixture
def base(workspace: Path) -> Path:
    """A run that has learnt a little of the corpus, and text of other letters in files of many lengths."""
    words = ["train.max_steps=30", "train.save_every=30", "train.run_dir=base", "optimizer.lr=5e-3", "model.max_position_embeddings=512"]
    assert main(["train", "tiny.yaml", *words]) == 0
    (workspace / "notes").mkdir()
    chance = random.Random(0)
    for number in range(12):  # so few that each step sees all of them
        words = ("".join(chance.choices("ABCDEFGH", k=chance.randint(2, 7))) for _ in range(12 + 4 * (number % 7)))
        (workspace / "notes" / f"{number}.md").write_text(" ".join(words))
    return workspace / "base"


def ran(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> Ran:
    batches: list[Mapping[str, torch.Tensor]] = []
    forwards: list[bool] = []
    loss_sum = CausalLMObjective.loss_sum

    def watched(self: CausalLMObjective, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if model.training:
            batches.append(batch)
            if len(batches) == 1:
                model.get_submodule("layers.0.mlp.up_proj").register_forward_hook(lambda layer, *given: forwards.append(layer.training))
        return loss_sum(self, model, batch)

    with monkeypatch.context() as patched:
        runs = assemblies(patched)
        patched.setattr(CausalLMObjective, "loss_sum", watched)
        assert main(["train", CONFIG, *OWN, *words]) == 0
    return Ran(runs[0], batches, sum(forwards), capsys.readouterr().err)


def test_the_config_does_what_it_says(base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = ran(monkeypatch, capsys, "train.run_dir=tuned", f"train.max_steps={STEPS}")
    model: Any = run.assembly.model
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and name != "lm_head"}
    assert len(linears) == 14
    for name, linear in linears.items():
        assert isinstance(linear, CodedLinear) and isinstance(linear, LoraLinear), name
        assert linear.weight.dtype == torch.uint8 and linear.layout.quant_type == "nf4" and linear.layout.nested
        assert linear.lora_A.shape[0] == 64 and linear.lora_scale == 16 / 64 and linear.lora_dropout == 0.05
        assert linear.lora_A.dtype == linear.lora_B.dtype == torch.bfloat16 and linear.lora_B.norm() > 0, "it trains"
    assert {p.dtype for p in model.parameters()} == {torch.uint8, torch.int32, torch.bfloat16}
    assert {name.rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}

    assert len(run.batches) == STEPS * ROWS and {tuple(batch["input_ids"].shape) for batch in run.batches} == {(1, LENGTH)}
    assert max(int(batch["segments"].max()) for batch in run.batches) > 1, "documents share rows"
    assert run.forwards == 2 * STEPS * ROWS, "blocks are computed again in backward"

    assert "optimizer paged_adamw_8bit saves nothing on the CPU, which has no pages to move; computed as adamw_8bit" in run.said
    kept = run.assembly.stepper.optimizer_tensors()
    moments = {name: value.dtype for name, value in kept.items() if name.endswith(("/exp_avg", "/exp_avg_sq"))}
    assert len(moments) == 2 * 28 and set(moments.values()) == {torch.uint8}, "two of each adapter's matrices, in 8 bits"

    losses = column("tuned", "loss")
    assert len(losses) == STEPS and losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    assert losses[0] == pytest.approx(theirs(find(base), run.batches[:ROWS]), rel=5e-3), "no change yet: the base's own"


def theirs(directory: Path, batches: list[Mapping[str, torch.Tensor]]) -> float:
    """Cross-entropy of transformers' model in 4 bits by bitsandbytes, document after document."""
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=settings, dtype=torch.bfloat16, device_map="cpu"
    )
    total, count = 0.0, 0
    for batch in batches:
        ids, labels, segments = (batch[name][0] for name in ("input_ids", "labels", "segments"))
        for segment in segments.unique().tolist():
            here = segments == segment
            if segment == 0 or not (labels[here] != IGNORED).any():
                continue
            with torch.no_grad():
                logits = model(ids[here][None]).logits[0].float()
            total += float(F.cross_entropy(logits, labels[here], ignore_index=IGNORED, reduction="sum"))
            count += int((labels[here] != IGNORED).sum())
    return total / count


def test_it_learns_what_lora_learns_over_the_base_in_16_bits(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faster = ("optimizer.lr=5e-3", "train.max_steps=6")
    ran(monkeypatch, capsys, "train.run_dir=qlora", *faster)
    ran(monkeypatch, capsys, "train.run_dir=lora", "quantization=none", *faster)
    coded, whole = column("qlora", "loss"), column("lora", "loss")
    assert all(one == pytest.approx(other, rel=0.05) for one, other in zip(coded, whole, strict=True))
    assert coded != whole and max(coded[-1] / coded[0], whole[-1] / whole[0]) < 0.7
