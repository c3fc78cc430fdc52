"""Frozen weights that stay in the model's files while adapters on them train, and a teacher's: the same training, without their bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from adapting import base_in, checkpoint, run, small_configs
from conftest import column, fw
from fw.meter.document import MemoryDocument, RankMemory
from plugins.taught import make_pair

CONFIGS = small_configs()
LORA = {"name": "lora", "rank": 4, "targets": ["all-linear"]}
FROM_FILES = "offload.params=nvme"
SCALARS = 256
"""Bytes, at most, of what autograd keeps of numbers that tensors are multiplied with, which are no tensors in a plan."""


def trained(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint(directory) / "adapter_model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], within: float = 0) -> bool:
    return one.keys() == other.keys() and all((one[name] - other[name]).abs().max() <= within for name in one)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("peft", [LORA, {"name": "dora", "rank": 4}, {"name": "prompt", "tokens": 2}], ids=lambda peft: peft["name"])
def test_what_trains_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, peft: dict[str, Any]) -> None:
    base_in(tmp_path, CONFIGS[name])
    before = (tmp_path / "base" / "model.safetensors").read_bytes()
    assert run(tmp_path, monkeypatch, peft) == 0
    whole = trained(tmp_path)
    for overrides in ([], ["activation=full"], ["offload.modules=['*.1.*']"]):
        assert run(tmp_path, monkeypatch, peft, FROM_FILES, *overrides) == 0
        assert same(trained(tmp_path), whole, within=1e-4 if name == "gpt2" else 0), "of transposed matrices sums go in another order"
    assert (tmp_path / "base" / "model.safetensors").read_bytes() == before


def test_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base_in(tmp_path, CONFIGS["llama"])
    assert run(tmp_path, monkeypatch, LORA) == 0
    whole = trained(tmp_path)
    assert run(tmp_path, monkeypatch, LORA, FROM_FILES, "train.max_steps=2", "train.save_every=2") == 0
    assert checkpoint(tmp_path).name == "step-00000002" and not same(trained(tmp_path), whole)
    assert run(tmp_path, monkeypatch, LORA, FROM_FILES, "resume=auto", "checkpoint.asynchronous=true") == 0
    assert checkpoint(tmp_path).name == "step-00000003" and same(trained(tmp_path), whole)
    (tmp_path / "base" / "model.safetensors").unlink()
    assert run(tmp_path, monkeypatch, LORA, FROM_FILES, "resume=auto") == 0, "nothing to do"


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_a_model_of_transformers_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str) -> None:
    """Where codes are made of matrices, embedding and head stay."""
    base_in(tmp_path, CONFIGS["llama"])
    own = ["model={name: hf, path: base}", f"quantization={quantization}"]
    assert run(tmp_path, monkeypatch, LORA, *own) == 0
    whole = trained(tmp_path)
    assert run(tmp_path, monkeypatch, LORA, FROM_FILES, *own) == 0
    assert same(trained(tmp_path), whole)
    assert asked("plan", FROM_FILES, *own).most["parameters"] < asked("plan", *own).most["parameters"]


def in_memory(base: Path, prefix: str = "") -> int:
    """Bytes of what is no matrix."""
    with safe_open(base / "model.safetensors", "pt") as file:
        return sum(file.get_tensor(name).nbytes for name in file.keys() if file.get_tensor(name).dim() != 2)  # noqa: SIM118


def asked(verb: str, *overrides: str) -> RankMemory:
    return MemoryDocument.from_json(json.loads(fw(verb, "run.yaml", "--json", *overrides).ok().out)).largest


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_plan_counts_what_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    base_in(tmp_path, CONFIGS[name])
    assert run(tmp_path, monkeypatch, LORA) == 0
    adapters = sum(tensor.nbytes for tensor in trained(tmp_path).values())
    for overrides in ([], ["activation=full"], ["sharding=ddp", "launch.devices=2"]):
        planned, measured = (asked(verb, FROM_FILES, *overrides) for verb in ("plan", "profile"))
        assert planned.allocated_peak_low <= measured.allocated_peak <= planned.allocated_peak + SCALARS
        assert planned.most["parameters"] == measured.most["parameters"] == in_memory(tmp_path / "base") + adapters
        assert asked("plan", *overrides).most["parameters"] > 3 * planned.most["parameters"]


def test_what_a_budget_keeps_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base_in(tmp_path, CONFIGS["llama"])
    assert run(tmp_path, monkeypatch, LORA) == 0
    whole = asked("plan").most["parameters"]
    embedding = 40 * 32 * 4
    assert asked("plan", FROM_FILES, f"offload.budget={whole}B").most["parameters"] == whole
    assert asked("plan", FROM_FILES, f"offload.budget={whole - embedding}B").most["parameters"] == whole - embedding


@pytest.mark.slow
def test_a_search_comes_to_it_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a disk takes is not in its time: it serves where nothing else fits."""
    base_in(tmp_path, CONFIGS["llama"])
    assert run(tmp_path, monkeypatch, LORA) == 0
    one_row = "train.micro_batch_size=1"
    search = ["memory.techniques=[offload, micro_batch]", "--fit", "--json"]
    without, with_it = asked("plan", one_row).allocated_peak, asked("plan", one_row, FROM_FILES).allocated_peak
    for budget, comes in ((without, False), ((without + with_it) // 2, True)):
        found = json.loads(fw("plan", "run.yaml", f"memory.budget={budget}B", *search).ok().out)["fit"]["chosen"]
        assert (FROM_FILES in found) == comes


def test_ranks_read_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base_in(tmp_path, CONFIGS["llama"])
    two = ["sharding=ddp", "launch.devices=2", "train.micro_batch_size=2"]
    assert run(tmp_path, monkeypatch, LORA, *two) == 0
    whole = trained(tmp_path)
    assert run(tmp_path, monkeypatch, LORA, *two, FROM_FILES) == 0
    assert same(trained(tmp_path), whole)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["peft=none"], "offload.params: nvme leaves frozen weights in the model's files, and all of this model trains: set peft"),
        (["sharding=fsdp"], "nvme leaves whole matrices in the model's files, and fsdp divides them between ranks; use sharding=ddp"),
        (["precision=bf16_true"], r"as the model computes with it (here in bfloat16)"),
        (["model={name: llama, hidden_size: 32}"], "it begins from none: set model.path, or offload.path"),
        (["offload.modules=[nowhere]"], "offload.modules: no parameter of the model is in 'nowhere'"),
        (["offload.modules=['*norm*']"], "offload.modules: nothing of *norm* can leave memory"),
        (["offload.budget=10B"], "cannot stay in the files"),
        (["sharding=zero", "sharding.stage=3"], "where DeepSpeed does not look; use sharding=single or ddp, or set offload.path"),
        (["sharding=zero"], "where DeepSpeed does not look; use sharding=single or ddp, or set offload.path"),
        (["launch.accelerator=cpu", "offload.params=device", "offload.budget=1GiB"], "parameters stay on the device"),
    ],
)
def test_what_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], overrides, says) -> None:
    base_in(tmp_path, CONFIGS["llama"])
    assert run(tmp_path, monkeypatch, LORA, FROM_FILES, *overrides) == 2
    assert says in capfd.readouterr().err and not (tmp_path / "run").exists()


DISTILL = """
model: {name: auto, path: student}
objective: {name: distill, teacher: teacher, chunk_tokens: 8}
data: {name: synthetic, vocab_size: 40, samples: 16}
train: {global_batch_size: 4, micro_batch_size: 2, sequence_length: 16, max_steps: 3, save_every: 3, run_dir: run, sample_tokens: 0}
optimizer: {name: adamw, lr: 3.0e-2}
launch: {accelerator: cpu}
logger: csv
"""


@pytest.mark.slow
def test_a_teacher_stays_in_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_pair(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(DISTILL)
    away = "objective.offload=nvme"
    for ranks in ([], ["sharding=ddp", "launch.devices=2"]):
        fw("train", "run.yaml", *ranks).ok()
        expected = column("run", "loss")
        fw("train", "run.yaml", *ranks, away).ok()
        assert column("run", "loss") == expected
        plain, planned, measured = asked("plan", *ranks), asked("plan", *ranks, away), asked("profile", *ranks, away)
        assert planned.allocated_peak_low <= measured.allocated_peak <= planned.allocated_peak
        matrices = Path("teacher/model.safetensors").stat().st_size - in_memory(Path("teacher"))
        assert 0.9 * matrices < plain.most["parameters"] - planned.most["parameters"] <= matrices
    fw("train", "run.yaml").ok()
    expected = column("run", "loss")
    answers = ["objective.answers=answers", "objective.top_k=39", away]
    fw("data", "teach", "run.yaml", *answers).ok()
    fw("train", "run.yaml", *answers).ok()
    assert column("run", "loss") == pytest.approx(expected, rel=1e-4)
    refused = fw("plan", "run.yaml", away, "precision=bf16")
    assert refused.code == 2 and "run.yaml:3: objective.offload: nvme leaves matrices in files" in refused.err
    fw("data", "teach", "run.yaml", *answers, "sharding=fsdp").ok()
    refused = fw("train", "run.yaml", away, "sharding=fsdp")
    assert refused.code == 2 and "objective.offload: nvme leaves whole matrices in files; use sharding=ddp" in refused.err
