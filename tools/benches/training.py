"""Training by fw beside transformers, peft, litgpt, torch and accelerate: the same shape and batches, each in a process of its own, in
rounds.

    tools/bench training [--cases …] [--ways …] [--rounds 3] [--steps 20] [--write] [--peers PYTHON …]

AdamW's state and what is trained in fp32 everywhere, products in the dtype named, gradients clipped. Tokens per second are of the median
step after those that warm up; beside them the share of what the step's matrix products alone would allow, measured in the same round.
Resident is a process's peak; allocated what torch's allocator has given out at most from the second step on, by its own events, in a run
of its own. Peers' Pythons are those of `tools/bench setup-peers`, or `--peers`. `--write` keeps all in docs/benchmarks.json and its page.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import benchmarks
from fw.config import load
from fw.launching.cores import usable_cores
from fw.recipe import resolve
from fw.training.order import StepOrder
from peers import check_quiet, having, load as load_average, printed, pythons
from random_llama import make
from training_cases import CASES, OVERRIDES, Case, config

HERE = Path(__file__).parent
WARM_UP = 3
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MODULES = {
    "transformers": "transformers",
    "peft": "peft",
    "litgpt": "litgpt",
    "torch fully_shard": "transformers",
    "accelerate's DDP": "accelerate",
}
"""What a peer's Python must have."""
Figures = dict[str, dict[str, list[float]]]
"""By way and figure, one of each round."""


def products_alone(case: Case) -> float:
    """Tokens per second of a step that were nothing but its products, of the same shapes: forward, again where blocks are recomputed, the
    gradients of what goes in, and those of weights that train."""
    shape = case.shape
    kv = shape.kv_heads * shape.hidden // shape.heads
    attention = [(shape.hidden, shape.hidden), (shape.hidden, shape.hidden), (shape.hidden, kv), (shape.hidden, kv)]
    block = [*attention, (shape.hidden, shape.inner), (shape.hidden, shape.inner), (shape.inner, shape.hidden)]
    head = (shape.hidden, shape.vocabulary)
    seconds = {each: _product_seconds(case, *each, again=case.recomputed and each != head) for each in {*block, head}}
    return case.rows * case.length / (shape.layers * sum(seconds[each] for each in block) + seconds[head])


def _product_seconds(case: Case, inner: int, outer: int, again: bool) -> float:
    """Median time of a layer's products."""
    tokens = case.rows * case.length
    x, w, g = (torch.randn(shape).to(DTYPES[case.precision]) for shape in ((tokens, inner), (outer, inner), (tokens, outer)))
    seconds = []
    for _ in range(7):
        began = time.perf_counter()
        for _ in range(2 if again else 1):
            torch.nn.functional.linear(x, w)
        g @ w
        if case.trains == "all":
            g.t() @ x
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def write_batches(file: Path, case: Case, place: Path, steps: int) -> None:
    """What fw's run will see, for the others: int64 ``[steps, rows, length + 1]``."""
    recipe = resolve(load(file, ["launch.devices=1", "sharding=single"]))
    rows = recipe.data.open(case.length).train
    order = StepOrder(len(rows), case.rows, recipe.train.seed, 0)
    whole = [torch.cat([row["input_ids"], row["labels"][-1:]]) for row in (rows[n] for n in range(len(rows)))]
    batches = [[whole[int(n)].numpy() for n in batch] for batch in islice(order, steps)]
    np.save(place / "batches.npy", np.array(batches))


def measure(case: Case, way: str, place: Path, peers: list[str], memory: bool) -> dict[str, float] | None:
    """Figures of one process; None where the program is not installed.

    Args:
        memory: measure what is allocated, and nothing else.
    """
    if way in OVERRIDES:
        return fw_allocated(place, OVERRIDES[way]) if memory else fw_trained(place, OVERRIDES[way])
    spec = case.spec(way, place, memory)
    if (python := having(MODULES[spec["program"]], peers)) is None:
        return None
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}"] if case.ranks > 1 else []
    threads = {"OMP_NUM_THREADS": str(max(1, usable_cores() // case.ranks))} if case.ranks > 1 else {}  # as fw's launcher has it
    return printed(way, [python, *launch, str(HERE / "training_peers.py"), json.dumps(spec)], threads)


def fw_trained(place: Path, overrides: list[str]) -> dict[str, float]:
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
    return {"tokens/s": median(rates), "loss": float(rows[-1]["loss"]), "resident": peak / 2**20}


def fw_allocated(place: Path, overrides: list[str]) -> dict[str, float]:
    """By `fw profile`, of the rank that takes most."""
    words = ["profile", str(place / "training.yaml"), "--json", "--steps", "2", "--timed", "0", *overrides]
    found = subprocess.run([sys.executable, "-m", "fw", *words], capture_output=True, text=True, check=False, cwd=place)
    if found.returncode:
        sys.exit(f"fw: {found.stderr.strip()[-2000:]}")
    return {"allocated": max(rank["allocated_peak_bytes"] for rank in json.loads(found.stdout)["per_rank"]) / 2**20}


def rounds(name: str, case: Case, ways: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """All figures of a case."""
    told: Figures = defaultdict(lambda: defaultdict(list))
    products: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        (place / "model").mkdir()
        make(place / "model", case.shape)
        write_batches(config(case, place, options.steps), case, place, options.steps)
        for number in range(options.rounds):
            if not options.busy:
                check_quiet()
            products.append(products_alone(case))
            print(f"{name}, round {number + 1}: products alone {products[-1]:,.0f} tokens/s, load {load_average():.2f}", flush=True)
            first = number % len(ways)
            for way in (*ways[first:], *ways[:first]):
                if (figures := measure(case, way, place, options.peers, memory=False)) is None:
                    print(f"  {way}: not installed")
                    continue
                if number == 0:
                    figures |= measure(case, way, place, options.peers, memory=True) or {}
                for figure, value in figures.items():
                    told[way][figure].append(value)
                print(f"  {way}: " + ", ".join(f"{figure} {value:,.4g}" for figure, value in figures.items()), flush=True)
    return {"products": products, "ways": told}


def versions(peers: list[str]) -> dict[str, str]:
    """Of torch and of what is measured beside fw, in the Pythons that run it."""
    found = {"torch": torch.__version__}
    for name in (*dict.fromkeys(MODULES.values()), "bitsandbytes"):
        if (python := having(name, peers)) is not None:
            code = f"import importlib.metadata as m; print(m.version({name!r}))"
            found[name] = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    return found


def main() -> None:
    """Measure, print tables, keep what was found where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="CASE", help=f"of: {'; '.join(CASES)}")
    parser.add_argument("--ways", nargs="+", metavar="WAY", help="programs, of those that a case has; all where left out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--peers", nargs="+", default=pythons(), metavar="PYTHON")
    parser.add_argument("--busy", action="store_true", help="measure also where others use the processors")
    parser.add_argument("--write", action="store_true", help="keep what was found in docs/benchmarks.json, and make its page anew")
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps: {options.steps} is too small; the first {WARM_UP} warm up")
    for name in options.cases:
        ways = [way for way in CASES[name].ways if not options.ways or way in options.ways]
        found = rounds(name, CASES[name], ways, options)
        print("\n".join(["", f"{name}: medians of {options.rounds}", "", *benchmarks.table(found), ""]), flush=True)
        if options.write:
            about = {"command": "tools/bench training --write", "steps": options.steps, "versions": versions(options.peers)}
            benchmarks.keep("training", name, found, about)


if __name__ == "__main__":
    main()
