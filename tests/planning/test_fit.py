"""Runs within a budget: what is chosen, that it is planned right, and that the run takes it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from conftest import environment, fw, summary
from fw.meter.document import MemoryDocument
from fw.planning.fitted import fit
from fw.planning.plan import plan

SYNTHETIC = ["data={name: synthetic, vocab_size: 300, samples: 64}", "train.global_batch_size=8", "train.max_steps=4"]


@pytest.fixture
def free(workspace: Path) -> Path:
    """`free.yaml`: what `tiny.yaml` says, but for what may be searched."""
    tree = yaml.safe_load((workspace / "tiny.yaml").read_text())
    del tree["train"]["micro_batch_size"]
    tree["optimizer"] = {"lr": 1e-3}
    (workspace / "free.yaml").write_text(yaml.safe_dump(tree))
    return workspace


def test_the_chosen_config_fits_and_keeps_what_was_set(free: Path) -> None:
    whole = plan("free.yaml", *SYNTHETIC).largest.allocated_peak
    budget = f"memory.budget={whole // 2}B"
    found = fit("free.yaml", *SYNTHETIC, budget, "precision=fp32", "objective.chunk_tokens=0")
    assert found.fit.fits
    assert found.recipe.names["precision"] == ("fp32",)
    assert found.recipe.train.global_batch_size == 8
    chosen = {override.partition("=")[0] for override in found.fit.best.overrides}
    assert chosen
    assert not chosen & {"precision", "objective.chunk_tokens"}
    kept = dict(found.fit.kept)
    assert kept["precision"] == "set at override precision=fp32"
    assert kept["chunked_loss"] == "set at override objective.chunk_tokens=0"
    assert plan(found.config).largest.allocated_peak == found.fit.best.taken <= whole // 2


def test_what_all_is_set_is_left_as_it_is(free: Path) -> None:
    given = [
        "train.micro_batch_size=8",
        "objective.chunk_tokens=0",
        "activation=none",
        "precision=fp32",
        "optimizer=adamw",
        "sharding=single",
    ]
    found = fit("free.yaml", *SYNTHETIC, *given, "memory.budget=1MiB")
    assert not found.fit.fits
    assert found.fit.best.overrides == ()
    assert len(found.fit.planned) == 1


def test_only_the_techniques_that_are_named_are_searched(free: Path) -> None:
    found = fit("free.yaml", *SYNTHETIC, "memory.techniques=[activation]", "memory.budget=1MiB")
    assert {choice.technique for candidate in found.fit.planned for choice in candidate.choices} == {"activation"}
    assert "'activatoin' is none; did you mean 'activation'?" in fw("plan", "free.yaml", "memory.techniques=[activatoin]").err


@pytest.mark.slow
def test_adapters_and_4_bits_where_somebody_asks_and_nothing_else_fits(free: Path) -> None:
    wide = [*SYNTHETIC, "model.hidden_size=512", "model.intermediate_size=1024", "train.sequence_length=64"]
    techniques, one = ["memory.techniques=[micro_batch,peft,quantization]"], ["train.micro_batch_size=1"]
    whole, least, adapters, quantized = (
        plan("free.yaml", *wide, *more).largest.allocated_peak
        for more in ([], one, [*one, "peft=lora"], [*one, "peft=lora", "quantization=nf4"])
    )
    assert quantized < adapters < least < whole

    def chosen(budget: int, *more: str) -> set[str]:
        found = fit("free.yaml", *wide, *techniques, f"memory.budget={budget}B", *more)
        assert found.fit.fits and plan(found.config).largest.allocated_peak == found.fit.best.taken <= budget
        return {override for override in found.fit.best.overrides if not override.startswith("train.")}

    assert chosen(least) == set(), "adapters would be faster"
    assert chosen((adapters + least) // 2) == {"peft=lora"}
    assert chosen((quantized + adapters) // 2) == {"peft=lora", "quantization=nf4"}
    assert chosen((quantized + adapters) // 2, "peft=lora") == {"quantization=nf4"}
    assert not fit("free.yaml", *wide, f"memory.budget={(adapters + least) // 2}B", "memory.techniques=[micro_batch]").fit.fits


def test_the_command_explains_and_writes_what_trains(free: Path) -> None:
    budget = plan("free.yaml", *SYNTHETIC).largest.allocated_peak // 2
    words = ["--fit", "--write", "chosen.yaml", "--pareto", "p.svg", "--html", "p.html", f"memory.budget={budget}B"]
    told = fw("plan", "free.yaml", *SYNTHETIC, *words).ok().out
    assert "as it is" in told
    assert "too much" in told
    assert "Chosen: " in told
    document = json.loads(fw("plan", "chosen.yaml", "--json", "--strict").ok().out)
    assert document["per_rank"][0]["allocated_peak_bytes"] <= budget
    assert "<title>as it is: " in (free / "p.svg").read_text()
    assert "What was searched" in (free / "p.html").read_text()
    fitted = json.loads(fw("plan", "free.yaml", *SYNTHETIC, "--fit", "--json", words[-1]).ok().out)
    assert MemoryDocument.from_json(fitted).fits
    assert fitted["fit"]["ladder"][0]["overrides"] == []
    assert fitted["fit"]["ladder"][-1]["overrides"] == fitted["fit"]["chosen"]


def test_without_a_search_there_is_nothing_to_write(workspace: Path) -> None:
    refused = fw("plan", "tiny.yaml", "--write", "x.yaml")
    assert refused.code == 2
    assert "--write: nothing is chosen without --fit" in refused.err


def test_nothing_fits_says_by_how_much_and_what_would(free: Path) -> None:
    given = [*SYNTHETIC, "memory.budget=1MiB", "memory.techniques=[micro_batch]"]
    refused = fw("train", "free.yaml", *given, "train.run_dir=none")
    assert refused.code == 2
    assert "nothing fits 1 MiB: " in refused.err
    assert "takes least" in refused.err
    assert "would do" in refused.err
    assert not (free / "none").exists()
    assert fw("plan", "free.yaml", *given, "--fit", "--strict").code == 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_run_stays_within_the_budget_and_tells_both(free: Path, ranks: int) -> None:
    shared = [*SYNTHETIC, f"launch.devices={ranks}"] + (["sharding=ddp"] if ranks > 1 else [])
    budget = int(0.55 * plan("free.yaml", *shared).largest.allocated_peak)
    shared[-1:] = [] if ranks > 1 else shared[-1:]  # what divides the model is open, too
    done = fw("train", "free.yaml", *shared, f"memory.budget={budget}B", "train.run_dir=run").ok()
    measured, planned = (MemoryDocument.from_json(json.loads((free / "run" / name).read_text())) for name in ("memory.json", "plan.json"))
    assert measured.largest.allocated_peak <= budget
    assert planned.largest.allocated_peak == pytest.approx(measured.largest.allocated_peak, rel=0.03)
    for component in ("parameters", "gradients", "optimizer"):
        assert planned.largest.most[component] == measured.largest.most[component]
    rows = [line.split() for line in done.out.splitlines()]
    assert [row[-1] for row in rows if row and row[0] in ("parameters", "gradients", "optimizer")] == ["exact"] * 3
    assert summary(free / "run")["steps"] == 4
    chosen = json.loads((free / "run" / "fit.json").read_text())["chosen"]
    assert "memory.techniques=[]" in chosen
    # What goes on is what was begun, whatever a search would find now.
    again = fw("train", "free.yaml", *shared, f"memory.budget={budget}B", "train.run_dir=run", "resume=auto", "train.max_steps=6").ok()
    assert "budget " not in again.err
    assert summary(free / "run")["steps"] == 6


def test_under_torchrun_the_first_rank_decides_for_all(free: Path) -> None:
    budget = int(0.6 * plan("free.yaml", *SYNTHETIC, "sharding=ddp", "launch.devices=2").largest.allocated_peak)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "fw", "train", "free.yaml"]
    words = [*SYNTHETIC, f"memory.budget={budget}B", "train.run_dir=run", "launch.accelerator=cpu"]
    done = subprocess.run([*torchrun, *words], capture_output=True, text=True, env=environment(), timeout=300, cwd=free)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Chosen: ") == 1
    measured = MemoryDocument.from_json(json.loads((free / "run" / "memory.json").read_text()))
    assert measured.world_size == 2
    assert measured.largest.allocated_peak <= budget
    words = ["memory.techniques=[micro_batch, sharding]", *words, "memory.budget=1MiB"]
    refused = subprocess.run([*torchrun, *words], capture_output=True, text=True, env=environment(), timeout=300, cwd=free)
    assert refused.returncode != 0
    assert refused.stderr.count("memory.budget: nothing fits 1 MiB") >= 1
