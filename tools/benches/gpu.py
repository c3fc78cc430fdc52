"""Training and generation on this host's GPU, in the shape of Llama 3's 8B with fewer blocks, beside what the GPU could do.

    tools/bench gpu [--out DIRECTORY] [--only NAME ...]

Training: tokens per second and MFU of the last steps, the most bytes allocated, and the plan. Generation: tokens per second of prefill and
decode beside transformers, and the bytes of weights that a step reads. Everything in a process of its own, one after another, a line of
JSON each. DIRECTORY/gpu.json has all figures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from random_llama import Shape, make

HERE = Path(__file__).parent
STEPS = 12
BASE = [
    "model={name: llama3-8b, num_hidden_layers: 4}",
    "data={name: synthetic, vocab_size: 128256, samples: 256}",
    "launch.accelerator=cuda",
    "precision=bf16",
    "optimizer=adamw",
    f"train={{max_steps: {STEPS}, global_batch_size: 2, sequence_length: 4096, log_every: 2}}",
    "train={val_every: 0, save_every: 0, sample_tokens: 0}",
    "logger=[csv]",
]
TRAININGS = {
    "bf16": [],
    "bf16, compiled": ["train.compile=true"],
    "recomputed": ["activation=full"],
    "recomputed selectively": ["activation=selective"],
    "fsdp": ["sharding=fsdp"],
    "adamw in 8 bits": ["optimizer=adamw_8bit"],
    "fp8 rowwise, compiled": ["precision={name: fp8, recipe: rowwise}", "train.compile=true"],
    "optimizer on the host": ["offload.optimizer=cpu"],
    "activations on the host": ["offload.activations=cpu"],
    "weights in bf16": ["precision=bf16_true"],
}
BLOCKS, PROMPT, NEW = 8, 512, 64
BATCHES = (1, 8, 32)
GENERATIONS = {"fw": ("fw", "auto"), "transformers": ("transformers", "")}
NOT_INSTALLED = 3


def seconds(work: Callable[[], object], times: int = 10) -> float:
    """The median of a call's time on the device."""
    taken = []
    for _ in range(times + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return median(taken[3:])


def copies() -> dict[str, float]:
    """Bytes per second of copies: within the GPU's memory, read and written together, and to and from page-locked memory, one way."""
    source, target = (torch.randn(1 << 30, device="cuda") for _ in range(2))
    host, part = torch.empty(1 << 28, pin_memory=True), source[: 1 << 28]
    return {
        "memory_bytes_per_s": 2 * source.nbytes / seconds(lambda: target.copy_(source)),
        "to_host_bytes_per_s": host.nbytes / seconds(lambda: host.copy_(part, non_blocking=True), 4),
        "from_host_bytes_per_s": host.nbytes / seconds(lambda: part.copy_(host, non_blocking=True), 4),
    }


def product() -> dict[str, float]:
    """FLOP/s of a large product of matrices."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return {"bf16_flops": 2 * 8192**3 / seconds(lambda: a @ b)}


def train(name: str, place: Path) -> dict[str, Any]:
    """A run's figures and its plan's; the error where one ended it."""
    run_dir = place / name.replace(" ", "-").replace(",", "")
    empty = place / "empty.yaml"
    empty.write_text("{}\n")
    words = [str(empty), *BASE, *TRAININGS[name]]
    fw = [sys.executable, "-m", "fw"]
    ran = subprocess.run([*fw, "train", *words, f"train.run_dir={run_dir}"], capture_output=True, text=True, check=False)
    if ran.returncode:
        return {"error": ran.stderr.strip()[-3000:]}
    summary = json.loads((run_dir / "summary.json").read_text())
    header, *lines = (run_dir / "metrics.csv").read_text().splitlines()
    rows = [dict(zip(header.split(","), line.split(","), strict=False)) for line in lines]
    late = [row for row in rows if int(row["step"]) > STEPS // 2 and row.get("tokens_per_s")]
    found: dict[str, Any] = {
        "tokens_per_s": median(float(row["tokens_per_s"]) for row in late),
        "mfu": median(float(row["mfu"]) for row in late),
        "peak_bytes": summary["peak_memory_bytes"],
        "loss": float(rows[-1]["loss"]),
    }
    told = subprocess.run([*fw, "plan", *words, "--json"], capture_output=True, text=True, check=False)
    if told.returncode:
        return {**found, "plan_error": told.stderr.strip()[-1000:]}
    document = json.loads(told.stdout)
    return {**found, "plan": {key: value for key, value in document.items() if key != "config"}}


def generate(name: str, model: Path) -> dict[str, Any]:
    """What `inference_peers.py` says of one program."""
    program, weights = GENERATIONS[name]
    words = [sys.executable, str(HERE / "inference_peers.py"), program, str(model), weights, str(PROMPT), str(NEW), *map(str, BATCHES)]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    if ran.returncode == NOT_INSTALLED:
        return {"error": "not installed"}
    return {"error": ran.stderr.strip()[-3000:]} if ran.returncode else json.loads(ran.stdout.splitlines()[-1])


def main() -> None:
    """Measure, and write and print the figures after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--only", nargs="+", choices=[*TRAININGS, *GENERATIONS], default=[*TRAININGS, *GENERATIONS])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device")
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "ceilings": copies() | product()}
    found["training"] = {}
    torch.cuda.empty_cache()
    print(json.dumps(found), flush=True)
    with tempfile.TemporaryDirectory() as place:
        for name in filter(TRAININGS.__contains__, options.only):
            one = found["training"][name] = train(name, Path(place))
            print(name, json.dumps({key: value for key, value in one.items() if key != "plan"}), flush=True)
            (options.out / "gpu.json").write_text(json.dumps(found, indent=1))
        if asked := [name for name in options.only if name in GENERATIONS]:
            found["step_bytes"] = make(Path(place), Shape(BLOCKS, 4096, 14336, 32, 8, 128_256))
            found["generation"] = {}
            for name in asked:
                found["generation"][name] = generate(name, Path(place))
                print(name, json.dumps(found["generation"][name]), flush=True)
                (options.out / "gpu.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
