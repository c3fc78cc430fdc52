"""Training by fw beside transformers and litgpt: a Llama of 56 M parameters, the same batches, each in a process of its own, in
rounds.

    tools/bench training [--rounds 3] [--steps 12] [--precisions bf16 fp32] [--ways …] [--peers PYTHON …]

Weights and AdamW's state in fp32 everywhere, products in the dtype named, gradients clipped. Tokens per second are of the median step after
those that warm up, and beside them the share of what the step's matrix products alone would allow, measured in the same round. `--peers`
names Pythons that have what this one has not: litgpt, whose weights are its own, and its losses others.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from itertools import islice
from pathlib import Path
from statistics import median

import numpy as np
import torch
import yaml

from fw.config import load
from fw.recipe import resolve
from fw.training.order import StepOrder
from peers import measured
from random_llama import Shape, make

HERE = Path(__file__).parent
SHAPE = Shape(layers=8, hidden=512, inner=1376, heads=8, kv_heads=4)
ROWS, LENGTH, WARM_UP = 4, 512, 3
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
WAYS = {
    "fw": ("fw", ()),
    "fw, compiled": ("fw", ("train.compile=true",)),
    "transformers": ("transformers", ("eager",)),
    "transformers, compiled": ("transformers", ("compiled",)),
    "litgpt": ("litgpt", ("eager",)),
    "litgpt, compiled": ("litgpt", ("compiled",)),
}


def products_alone(dtype: torch.dtype) -> float:
    """Tokens per second of a step that were nothing but its layers' products, forward and both gradients, of the same shapes."""
    hidden, kv = SHAPE.hidden, SHAPE.kv_heads * SHAPE.hidden // SHAPE.heads
    attention = [(hidden, hidden), (hidden, hidden), (hidden, kv), (hidden, kv)]
    block = [*attention, (hidden, SHAPE.inner), (hidden, SHAPE.inner), (SHAPE.inner, hidden)]
    seconds = {shape: _product_seconds(*shape, dtype) for shape in {*block, (hidden, SHAPE.vocabulary)}}
    return ROWS * LENGTH / (SHAPE.layers * sum(seconds[shape] for shape in block) + seconds[hidden, SHAPE.vocabulary])


def _product_seconds(inner: int, outer: int, dtype: torch.dtype) -> float:
    """Median time of a layer's three."""
    x, w, g = (torch.randn(shape).to(dtype) for shape in ((ROWS * LENGTH, inner), (outer, inner), (ROWS * LENGTH, outer)))
    seconds = []
    for _ in range(7):
        began = time.perf_counter()
        torch.nn.functional.linear(x, w)
        g @ w
        g.t() @ x
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def config(place: Path, steps: int) -> Path:
    """Of fw's run."""
    tree = {
        "model": {"name": "auto", "path": str(place / "model")},
        "data": {"name": "synthetic", "vocab_size": SHAPE.vocabulary, "samples": ROWS * steps},
        "optimizer": {"name": "adamw", "lr": 3e-4},
        "schedule": "constant",
        "train": {
            "max_steps": steps,
            "global_batch_size": ROWS,
            "micro_batch_size": ROWS,
            "sequence_length": LENGTH,
            "val_every": 0,
            "save_every": 0,
            "sample_tokens": 0,
            "run_dir": str(place / "run"),
        },
        "memory": {"measure_step": 0},
        "launch": {"accelerator": "cpu"},
        "logger": ["csv"],
    }
    file = place / "training.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def write_batches(file: Path, place: Path, steps: int) -> None:
    """What fw's run will see, for the others: int64 ``[steps, rows, length + 1]``."""
    recipe = resolve(load(file, []))
    rows = recipe.data.open(LENGTH).train
    order = StepOrder(len(rows), ROWS, recipe.train.seed, 0)
    whole = [torch.cat([row["input_ids"], row["labels"][-1:]]) for row in (rows[n] for n in range(len(rows)))]
    batches = [[whole[int(n)].numpy() for n in batch] for batch in islice(order, steps)]
    np.save(place / "batches.npy", np.array(batches))


def measure(way: str, precision: str, place: Path, options: argparse.Namespace) -> dict[str, float] | None:
    """Tokens per second, the last loss and the process's peak in MiB; None where the program is not installed."""
    program, given = WAYS[way]
    if program == "fw":
        return of_fw(place, [f"precision={precision}", *given])
    return measured(way, HERE / "training_peers.py", [program, *given, precision, str(place)], options.peers)


def of_fw(place: Path, overrides: list[str]) -> dict[str, float]:
    """By what `fw train` writes down."""
    words = [sys.executable, "-m", "fw", "train", str(place / "training.yaml"), *overrides]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    if found.returncode:
        sys.exit(f"fw: {found.stderr.strip()[-2000:]}")
    with (place / "run" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    peak = json.loads((place / "run" / "summary.json").read_text())["peak_memory_bytes"]
    subprocess.run(["rm", "-r", str(place / "run")], check=True)
    rates = [float(row["tokens_per_s"]) for row in rows[WARM_UP:]]
    return {"tokens/s": median(rates), "loss": float(rows[-1]["loss"]), "peak": peak / 2**20}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--precisions", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--peers", nargs="+", default=[])
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps: {options.steps} is too small; the first {WARM_UP} warm up")
    told: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    speeds: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        (place / "model").mkdir()
        make(place / "model", SHAPE)
        write_batches(config(place, options.steps), place, options.steps)
        for number in range(options.rounds):
            for precision in options.precisions:
                speeds[precision].append(products_alone(DTYPES[precision]))
                said = f"products alone {speeds[precision][-1]:,.0f} tokens/s, load {os.getloadavg()[0]:.2f}"
                print(f"round {number + 1}, {precision}: {said}", flush=True)
                for way in options.ways:
                    if (figures := measure(way, precision, place, options)) is None:
                        print(f"  {way}: not installed")
                        continue
                    for name, value in figures.items():
                        told[precision, way][name].append(value)
                    print(f"  {way}: " + ", ".join(f"{name} {value:,.4g}" for name, value in figures.items()), flush=True)
    print(f"\nmedian of {options.rounds} rounds\n\n| | | tokens/s | of its products alone | last loss | peak resident |\n|" + " --- |" * 6)
    for (precision, way), by_name in told.items():
        rate = median(by_name["tokens/s"])
        share = rate / median(speeds[precision])
        print(f"| {precision} | {way} | {rate:,.0f} | {share:.2f} | {by_name['loss'][-1]:.4f} | {median(by_name['peak']):,.0f} MiB |")


if __name__ == "__main__":
    main()
