"""The end of a run: summary, yardsticks, a sample of text, the report."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fw.config import format_size, to_yaml
from fw.kinds.data import Corpus
from fw.meter import compared
from fw.meter.areas import areas
from fw.meter.detail import Detail
from fw.meter.document import MemoryDocument, RankMemory
from fw.meter.duplicates import duplicates
from fw.meter.energy import GPU, PROCESSORS
from fw.meter.findings import over_ranks
from fw.meter.step_clock import shares
from fw.meter.step_memory import CATEGORIES
from fw.meter.step_time import StepTime
from fw.recipe import Recipe
from fw.training import run_dir
from fw.training.between_steps import BetweenSteps
from fw.training.loggers import Guarded
from fw.training.module import TrainingModule
from fw.training.ngram import bits_per_byte
from fw.training.report import render
from fw.training.sample import sample

_LARGEST_BASELINE_TOKENS = 32_000_000


def finish(recipe: Recipe, module: TrainingModule, between: BetweenSteps, device: torch.device) -> dict[str, Any]:
    """Measure, write ``summary.json`` and ``report.html``, print the table. Collective; the files are the first rank's.

    Returns:
        the summary, on every rank.
    """
    text = ""
    if between.release.thorough:
        between.release.between_phases()
    if recipe.train.sample_tokens:
        prompt = recipe.train.sample_prompt or _prompt(module.corpus)
        context = recipe.train.sequence_length
        continued = sample(
            module.assembly.stepper,
            module.corpus.tokenizer,
            prompt,
            recipe.train.sample_tokens,
            context,
            device,
            module.strategy.broadcast,
        )
        text = f"{prompt}▸{continued}"
    (memory_most,) = module.strategy.max_on_host([float(module.peak_memory_bytes())])
    (memory_least,) = module.strategy.max_on_host([-float(module.peak_memory_bytes())])
    rate = between.throughput.rate
    last = between.rows[-1] if between.rows else {}
    summary: dict[str, Any] = {
        "steps": module.global_step,
        "tokens": module.tokens_seen,
        "tokens_per_s": rate.tokens,
        "mfu": between.mfu(rate),
        "skipped_steps": between.skipped,
        "train_loss": last.get("loss"),
        "val_loss": module.val_loss,
        "val_bits_per_byte": None,
        "bigram_bits_per_byte": None,
        "fourgram_bits_per_byte": None,
        "peak_memory_bytes": int(memory_most),
        "measured_step": _largest(module),
        "figures": {name: last[name] for name in recipe.objective.figures if name in last},
    }
    memory = _memory(module, between, device)
    spent = _time(module, between)
    summary["phase_seconds"] = dict(spent.phases[0]) if spent is not None and spent.phases else None
    summary["joules_per_token"] = None if spent is None else dict(spent.joules_per_token)
    if between.release.thorough:
        summary |= _released(between, module)
    is_likelihood = recipe.objective.is_likelihood
    is_likelihood = is_likelihood and module.corpus.val_bytes > 0  # else what is learnt are special tokens alone, which are no text
    if module.val_loss is not None and is_likelihood:
        nats = module.val_loss * (module.corpus.val_tokens - 1)
        summary["val_bits_per_byte"] = nats / math.log(2) / module.corpus.val_bytes
    if module.strategy.is_global_zero:
        if module.val_loss is not None and is_likelihood and module.corpus.train_tokens <= _LARGEST_BASELINE_TOKENS:
            train_text, val_text = module.corpus.train_text(), module.corpus.val_text()
            summary["bigram_bits_per_byte"] = bits_per_byte(train_text, val_text, order=2)
            summary["fourgram_bits_per_byte"] = bits_per_byte(train_text, val_text, order=4)
        _write(recipe, summary, text, -int(memory_least), between.rows, memory)
        _show(recipe, module, text, memory)
        if memory is not None:
            (recipe.run_dir / run_dir.MEMORY).write_text(json.dumps(memory.as_json(), indent=1) + "\n")
            assert memory.detail is not None
            (recipe.run_dir / run_dir.MEMORY_DETAIL).write_text(json.dumps(memory.detail.as_json()) + "\n")
        if spent is not None:
            (recipe.run_dir / run_dir.TIME).write_text(json.dumps(spent.as_json()) + "\n")
    return module.strategy.broadcast(summary)


def _largest(module: TrainingModule) -> dict[str, Any] | None:
    """The measured step of the rank on which it took most; None where no step was measured. Collective."""
    step = module.recipe.memory.measure_step
    own = module.memory.get(step)
    (peak,) = module.strategy.max_on_host([float(own.peak_bytes) if own else 0.0])
    if own is None:
        return None
    phases = ("forward", "backward", "step")
    values = [float(own.by_category.get(category, 0)) for category in CATEGORIES] + [float(phases.index(own.phase))]
    rank = float(module.global_rank) if own.peak_bytes == peak else math.inf
    (first,) = module.strategy.max_on_host([-rank])  # of several that took as much, one: else categories would be mixed
    *sizes, phase = module.strategy.max_on_host(values if -rank == first else [0.0] * len(values))
    by_category = {category: int(size) for category, size in zip(CATEGORIES, sizes, strict=True)}
    return {"step": step, "phase": phases[int(phase)], "peak_bytes": int(peak), "by_category": by_category}


def _memory(module: TrainingModule, between: BetweenSteps, device: torch.device) -> MemoryDocument | None:
    """Of the steps that were measured; None where there are none. Collective."""
    recipe = module.recipe
    if not module.memory:
        return None
    steps = [module.memory[step] for step in sorted(module.memory)]
    settled = steps[1:] or steps
    own = RankMemory.of_steps(module.global_rank, settled, module.host_peak.bytes())
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)  # other processes' memory counts, too
        reserved = torch.cuda.max_memory_reserved(device)
        given_back = reserved - torch.cuda.memory_reserved(device)
        own = replace(own, reserved_peak=reserved, driver_peak=total - free + given_back)
    ranks = module.strategy.gather(own)
    found = MemoryDocument(
        recipe.config.name, device.type, recipe.world_size, recipe.memory.budget_bytes, ranks, between.throughput.step_time
    )
    findings = over_ranks(module.strategy.gather([*module.leaks.findings(), *duplicates(_tensors(module))]))
    highest = max(settled, key=lambda step: step.peak_bytes)
    detail = Detail(own.rank, highest.parameters, highest.timeline, highest.modules, findings)
    return replace(found, detail=module.strategy.broadcast(detail, found.largest.rank))


def _time(module: TrainingModule, between: BetweenSteps) -> StepTime | None:
    """Where the time went of the steps that count, and of one that was traced; None where there are none. Collective."""
    throughput = between.throughput
    phases = module.clock.phases(throughput.step_time or 0.0)
    every = module.strategy.gather(phases)
    names = (PROCESSORS, GPU)
    joules = module.strategy.sum_on_host([throughput.joules.get(name, 0.0) for name in names])
    counted = [each for each in every if each is not None]
    if len(counted) < len(every) and module.trace is None:
        return None
    per_token = {
        name: total / throughput.tokens
        for name, total in zip(names, joules, strict=True)
        if total and math.isfinite(total) and throughput.tokens
    }
    rate = throughput.rate
    return StepTime(counted, rate.tokens, between.mfu(rate), per_token, module.clock.levels, module.trace)


def _tensors(module: TrainingModule) -> list[tuple[str, Tensor]]:
    """Parameters and buffers, what this rank has of them."""
    stepper = module.assembly.stepper
    own = [(name, weight) for name, kept in stepper.kept_by_parameter().items() for weight in kept.weights]
    return own + list(stepper.module.named_buffers())


def _released(between: BetweenSteps, module: TrainingModule) -> dict[str, Any]:
    """What memory.release did, on the rank that gave back most, and on the one that took longest. Collective."""
    release = between.release
    most, longest = module.strategy.max_on_host([float(-1 if release.bytes is None else release.bytes), release.seconds])
    return {"releases": release.times, "released_bytes": None if most < 0 else int(most), "release_seconds": longest}


def _write(
    recipe: Recipe, summary: dict[str, Any], text: str, least_memory: int, rows: Sequence[Mapping[str, Any]], memory: MemoryDocument | None
) -> None:
    directory = recipe.run_dir
    (directory / run_dir.SUMMARY).write_text(json.dumps(summary, indent=1) + "\n")
    lines = _lines(recipe, summary, least_memory, memory)
    rows = (_stored_rows(directory) if "csv" in recipe.names["logger"] else []) or rows
    page = render(f"{recipe.config.name}: {summary['steps']} steps", lines, rows, text, to_yaml(recipe.tree), summary["measured_step"])
    (directory / run_dir.REPORT).write_text(page)
    width = max(len(label) for label, _ in lines)
    print("\n".join(f"{label:<{width}}  {value}" for label, value in lines))
    if text:
        print(f"\nsample (▸ marks where the model takes over):\n{text}")
    print(f"\nreport: {directory / run_dir.REPORT}")


def _show(recipe: Recipe, module: TrainingModule, text: str, memory: MemoryDocument | None) -> None:
    """To loggers that show texts and pictures."""
    detail = None if memory is None else memory.detail
    budget = None if memory is None else memory.budget
    title = f"Memory over one step of {recipe.config.name}, measured"
    for logger in module.trainer.loggers:
        assert isinstance(logger, Guarded)
        if text:
            logger.text("sample", text, module.global_step)
        if detail is not None:
            logger.picture("memory", partial(_drawn, detail, title, budget), module.global_step)


def _drawn(detail: Detail, title: str, budget: int | None) -> bytes:
    return areas(detail.timeline, title, budget).png()


def _lines(recipe: Recipe, summary: dict[str, Any], least_memory: int, memory: MemoryDocument | None) -> list[tuple[str, str]]:
    def number(key: str, form: str) -> str:
        value = summary[key]
        return "not measured" if value is None else format(value, form)

    ranks = f"{recipe.world_size} rank{'s' * (recipe.world_size > 1)}, {recipe.names['sharding'][0]}, {recipe.names['precision'][0]}"
    lines = [
        ("ranks", ranks),
        ("steps", number("steps", ",")),
        *([("  not made (not finite)", number("skipped_steps", ","))] if summary["skipped_steps"] else []),
        ("tokens", number("tokens", ",")),
        ("tokens/s", number("tokens_per_s", ",.0f")),
        ("MFU", number("mfu", ".1%")),
        *([("time of a step", shares(summary["phase_seconds"]))] if summary["phase_seconds"] else []),
        *((f"energy per token, {name}", f"{joules:.3g} J") for name, joules in (summary["joules_per_token"] or {}).items()),
        ("training loss (last step)", number("train_loss", ".4f")),
        ("validation loss", number("val_loss", ".4f")),
    ]
    if recipe.objective.is_likelihood:
        lines.append(("validation bits per byte", number("val_bits_per_byte", ".4f")))
    if figures := summary["figures"]:
        lines += [(name, f"{value:.4f}") for name, value in figures.items()]
    if summary["bigram_bits_per_byte"] is not None:
        lines += [
            ("  byte bigram, same data", number("bigram_bits_per_byte", ".4f")),
            ("  byte 4-gram, same data", number("fourgram_bits_per_byte", ".4f")),
        ]
    peak = summary["peak_memory_bytes"]
    spread = f" (least on a rank: {format_size(least_memory)})" if recipe.world_size > 1 else ""
    lines.append(("peak memory of a rank", format_size(peak) + spread))
    if "releases" in summary:
        released = "not measured" if summary["released_bytes"] is None else format_size(summary["released_bytes"])
        lines.append(("  released between phases", f"{released} in {summary['releases']} times, {summary['release_seconds']:.2f} s"))
    planned = run_dir.planned(recipe.run_dir)
    if measured := summary["measured_step"]:
        lines.append(
            (f"allocated at the peak of step {measured['step']}", f"{format_size(measured['peak_bytes'])}, in {measured['phase']}")
        )
        if planned is None:
            lines += [(f"  {category}", format_size(size)) for category, size in measured["by_category"].items() if size]
    if planned is not None and memory is not None:
        lines += compared.lines(planned, memory)
    budget = recipe.memory.budget_bytes
    if budget is not None:
        peak = peak if memory is None else memory.largest.taken  # what a plan tells, and not what a process has besides
        over = f"exceeded by {format_size(peak - budget)}" if peak > budget else f"{format_size(budget - peak)} left"
        lines.append(("memory budget", f"{format_size(budget)}, {over}"))
    return lines


def _stored_rows(directory: Path) -> list[dict[str, Any]]:
    """All rows of the run, those before a resume included, as the csv logger kept them."""
    file = directory / run_dir.METRICS
    if not file.is_file():
        return []
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def _prompt(corpus: Corpus) -> str:
    """The beginning of a held-out document."""
    documents = corpus.val_text()
    return " ".join(documents[0].split(" ")[:12]) if documents else ""
