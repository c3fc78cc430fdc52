"""What `memory.budget` chooses beside every configuration measured: docs/fit.md.

    tools/bench fit
    tools/bench fit --quick --out runs/fit

A llama of 98 M parameters, whose activations are most of its peak. For each part of the unconstrained peak as budget the chosen run is
measured, and, by brute force, every combination of what may be changed. Combinations are measured once, in turn; then, for each budget,
the chosen one and the fastest that fit, one after another in the same minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from tqdm import tqdm

from fw.config import format_size

ROOT = Path(__file__).parents[2]
PARTS = (1.0, 0.7, 0.5, 0.35)
CONFIG: dict[str, Any] = {
    "model": {
        "name": "llama",
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "intermediate_size": 2048,
        "vocab_size": 8192,
        "tie_word_embeddings": False,
    },
    "data": {"name": "synthetic", "vocab_size": 8192, "samples": 64},
    "precision": "bf16",
    "optimizer": {"name": "adafactor"},
    "sharding": "single",
    "train": {"global_batch_size": 16, "sequence_length": 256, "max_steps": 8},
    "launch": {"accelerator": "cpu"},
}
QUICK: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4}
CHOICES = {
    "micro_batch": ["", "train.micro_batch_size=8", "train.micro_batch_size=4", "train.micro_batch_size=2"],
    "chunked_loss": ["", "objective.chunk_tokens=1024"],
    "activation": [
        "",
        "activation=selective",
        "activation={name: ratio, ratio: 0.5}",
        "activation=full",
    ],
}
"""What is tried of what may be changed, as overrides; the search has a micro-batch of 1 and two more parts of the blocks besides."""


def fw(*words: str) -> dict[str, Any]:
    """The document that a command prints."""
    done = subprocess.run([sys.executable, "-m", "fw", *words, "--json"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"fw {' '.join(words)}\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def profiled(file: str, overrides: Sequence[str], measured: int, timed: int) -> tuple[int, float]:
    """Measured peak in bytes, and seconds of a step."""
    found = fw("profile", file, *overrides, "--steps", str(measured), "--timed", str(timed))
    return found["per_rank"][0]["allocated_peak_bytes"], found["step_time_s"]


def combinations() -> Iterator[tuple[str, ...]]:
    for picks in itertools.product(*CHOICES.values()):
        yield tuple(pick for pick in picks if pick)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="directory of fit.md and fit.svg (docs)")
    parser.add_argument("--again", type=int, default=2, metavar="N", help="measurements of the chosen and of those it is compared with (2)")
    parser.add_argument("--beside", type=int, default=2, metavar="N", help="of the fastest that fit, how many are measured again (2)")
    parser.add_argument("--quick", action="store_true", help="with a small model, whose figures mean nothing: to try the command")
    options = parser.parse_args(words)
    options.out.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, "model": {**CONFIG["model"], **(QUICK if options.quick else {})}}
    with tempfile.TemporaryDirectory(prefix="fw-fit-") as directory:
        file = str(Path(directory) / "fit.yaml")
        Path(file).write_text(yaml.safe_dump(config))
        os.environ["FW_CACHE"] = str(Path(directory) / "cache")
        base = fw("plan", file)["per_rank"][0]
        whole = base["allocated_peak_bytes"]
        share = base["components_at_peak"]["activations_bytes"] / whole
        budgets = [int(part * whole) for part in PARTS]
        fits = [fw("plan", file, "--fit", f"memory.budget={budget}B") for budget in budgets]
        picture = options.out / "fit.svg"
        fw("plan", file, "--fit", f"memory.budget={budgets[2]}B", "--pareto", str(picture))
        every = {each: profiled(file, each, 1, 1) for each in tqdm(list(combinations()), unit="configuration")}
        rows = []
        for budget, fit in zip(budgets, fits, strict=True):
            chosen = tuple(fit["fit"]["chosen"])
            fitting = sorted((each for each, (peak, _) in every.items() if peak <= budget), key=lambda each: every[each][1])
            compared = list(dict.fromkeys([chosen, *fitting[: options.beside]]))
            times: dict[tuple[str, ...], list[tuple[int, float]]] = {each: [] for each in compared}
            for _ in range(options.again):
                for each in compared:
                    times[each].append(profiled(file, each, 2, 2))
            seconds = {each: median(time for _, time in found) for each, found in times.items()}
            fastest = min((each for each in compared if each in every), key=lambda each: seconds[each])
            peak = max(peak for peak, _ in times[chosen])
            rows.append((budget, fit, chosen, peak, seconds[chosen], fastest, seconds[fastest], len(fitting)))
    text = page(whole, share, rows, len(every))
    (options.out / "fit.md").write_text(text)
    print(text)


def page(whole: int, share: float, rows: Sequence[tuple[Any, ...]], combinations: int) -> str:
    lines = [
        "# What a budget chooses, beside all that fits",
        "",
        f"`tools/bench fit`, {date.today()}, torch {torch.__version__}, {os.cpu_count()} cores. A llama of 98 M parameters in bf16,",
        f"Adafactor; 16 sequences of 256 tokens a step. It takes {format_size(whole)} at the peak, {share:.0%} of it activations.",
        f"Micro-batch, recomputation and the loss in chunks may be changed; {combinations} combinations are measured. The last columns",
        "are of the fastest of those that fit, measured again in the same minutes as the chosen one.",
        "",
        "| budget | chosen | plans | predicted | measured | step | fastest that fits | its step | chosen ÷ fastest |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for budget, fit, chosen, peak, seconds, fastest, least, fitting in rows:
        cells = [
            f"{budget / whole:.2f}: {format_size(budget)}",
            _words(chosen),
            str(len(fit["fit"]["planned"])),
            format_size(fit["per_rank"][0]["allocated_peak_bytes"]),
            format_size(peak),
            f"{seconds:.2f} s",
            f"{_words(fastest)} (of {fitting})",
            f"{least:.2f} s",
            f"{seconds / least:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "![predicted memory and time of all that was searched for half of the peak](fit.svg)", ""]
    return "\n".join(lines)


def _words(overrides: Sequence[str]) -> str:
    return ", ".join(f"`{override.removeprefix('train.').removeprefix('objective.')}`" for override in overrides) or "as it is"


if __name__ == "__main__":
    main()
