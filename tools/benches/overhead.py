"""Tokens per second of `fw train` against a bare PyTorch loop: same model, batch and dtype, in turns."""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

import benchmarks

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "quickstart.yaml"
WARM_UP = 10
_PLAIN = {**os.environ, "FW_TRAINING_KERNELS": "off"}
"""What is faster in fw is not to hide what it costs."""


def overrides(options: argparse.Namespace) -> list[str]:
    off = ["train.val_every=0", "train.save_every=0", "train.sample_tokens=0"]
    return [*off, f"train.max_steps={options.steps}", f"precision={options.precision}", *options.override]


def fw_rate(options: argparse.Namespace, directory: str) -> float:
    run_dir = Path(directory) / "run"
    command = [sys.executable, "-m", "fw", "train", str(CONFIG), f"train.run_dir={run_dir}", *overrides(options)]
    subprocess.run(command, check=True, capture_output=True, env=_PLAIN)
    with (run_dir / "metrics.csv").open(newline="") as file:
        rates = [float(row["tokens_per_s"]) for row in csv.DictReader(file)]
    subprocess.run(["rm", "-r", str(run_dir)], check=True)
    return 1 / statistics.mean(1 / rate for rate in rates[WARM_UP:])


def bare_rate(options: argparse.Namespace) -> float:
    command = [sys.executable, __file__, "--bare", "--steps", str(options.steps), "--precision", options.precision, *options.override]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=_PLAIN)
    return float(done.stdout)


def run_bare(options: argparse.Namespace) -> float:
    """In a process of its own: the recipe's model and data, and nothing else of fw."""
    import torch

    from bare_loop import train
    from fw.assemble import values
    from fw.config import load
    from fw.recipe import resolve

    recipe = resolve(load(CONFIG, overrides(options)))
    recipe.data.prepare(print)
    corpus = recipe.data.open(recipe.train.sequence_length)
    with torch.device("meta"):
        model = recipe.model.build(recipe.model.vocab_size or corpus.tokenizer.vocab_size, recipe.train.sequence_length, recipe.attention)
    model.materialise(torch.device("cpu"))
    values(model, recipe.train.seed, None, None)(model.stored())
    samples = [corpus.train[i] for i in range(len(corpus.train))]
    ids = torch.stack([torch.cat((s["input_ids"], s["labels"][-1:])) for s in samples])
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.precision]
    seconds = train(model, ids, options.steps, recipe.train.global_batch_size, recipe.optimizer.config.lr, dtype)
    tokens_per_step = recipe.train.global_batch_size * recipe.train.sequence_length
    return tokens_per_step / statistics.mean(seconds[WARM_UP:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (5)")
    parser.add_argument("--steps", type=int, default=80, help=f"steps of a turn, the first {WARM_UP} not counted (80)")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--write", action="store_true", help="keep what was found in docs/benchmarks.json, and make its page anew")
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("override", nargs="*", help="overrides of configs/quickstart.yaml for both")
    options = parser.parse_args()
    if options.bare:
        print(run_bare(options))
        return 0
    print(f"load average before: {os.getloadavg()[0]:.2f}")
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for turn in tqdm(range(options.rounds), unit="round"):
            # The order alternates, so that a drift of the machine favours neither.
            if turn % 2:
                bare, ours = bare_rate(options), fw_rate(options, directory)
            else:
                ours, bare = fw_rate(options, directory), bare_rate(options)
            rows.append((ours, bare))
    print(f"{'round':>5}  {'fw tok/s':>10}  {'bare tok/s':>10}  {'ratio':>6}")
    for number, (ours, bare) in enumerate(rows):
        print(f"{number:>5}  {ours:>10,.0f}  {bare:>10,.0f}  {ours / bare:>6.3f}")
    ratios = sorted(ours / bare for ours, bare in rows)
    print(f"median ratio {statistics.median(ratios):.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f} ({options.precision})")
    if options.write:
        case = " ".join(["configs/quickstart.yaml", f"precision={options.precision}", *options.override])
        benchmarks.keep("overhead", case, {"ratios": ratios}, {"command": "tools/bench overhead --write", "steps": options.steps})
    return 0


if __name__ == "__main__":
    sys.exit(main())
