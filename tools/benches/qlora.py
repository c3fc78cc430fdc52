"""QLoRA beside LoRA on a Llama of 336 M parameters that was trained before: bytes, memory while loading, losses. docs/qlora.md.

    tools/bench qlora
    tools/bench qlora --base-steps 10 --steps 10 --out runs/qlora

The base learns from the documentation that every Python carries; the adapters from its library's sources, which the base has never seen.
Both adapters begin alike and see the same rows in the same order. The exit code is 1 where one of the bounds does not hold.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import sysconfig
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch

from fw.config import format_size
from fw.meter.drawing import Drawing, Line, Words
from ladder_page import machine

ROOT = Path(__file__).parents[2]
LIBRARY = sysconfig.get_paths()["stdlib"]
BASE: dict[str, Any] = {
    "model": {
        "name": "llama",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 2816,
        "vocab_size": 32000,
    },
    "data": {"name": "text", "source": "python-docs", "vocab_size": 8192},
    "optimizer": {"name": "adamw", "lr": 6.0e-4},
    "schedule": {"name": "cosine", "warmup_steps": 10},
    "precision": "bf16",
    "train": {"global_batch_size": 4, "sequence_length": 256, "sample_tokens": 0, "val_every": 0},
    "launch": {"accelerator": "cpu"},
    "logger": ["csv"],
}
LOADING = """
import json, sys
from pathlib import Path
import torch
import bitsandbytes
import fw
from fw.kinds import make
from fw.kinds.model import ModelPlugin
from fw.kinds.quantization import QuantizationPlugin
from fw.meter.memory import OwnPeak

fw.load_model, make(QuantizationPlugin, "nf4"), make(ModelPlugin, "auto", path=sys.argv[1])  # what programs take is no part of it

def kept(model, names):
    return sum(p.nbytes for name, p in model.named_parameters() if any(part in name for part in names))

LINEAR = ("_proj",)
with OwnPeak(torch.device("cpu")) as peak:
    model = fw.load_model(sys.argv[1], dtype=torch.bfloat16, quantization="nf4")
parameters = list(model.named_parameters())
quantized = {name: w for name, w in model.quantized.items()}
print(json.dumps({
    "growth": peak.bytes,
    "linears": kept(model, LINEAR),
    "linears_bf16": sum(2 * w.shape[0] * w.shape[1] for w in quantized.values()),
    "model": sum(p.nbytes for _, p in parameters),
    "model_bf16": sum(2 * p.numel() for p in model.base().values()),
    "largest": max(2 * p.numel() for p in model.base().values()),
    "parameters": sum(p.numel() for p in model.base().values()),
}))
"""
"""Loads a model of 4 bits in a process of its own, and says what that took."""
STYLES = {"lora": ("ink", False), "qlora": ("limit", True)}
"""Colour, and whether dashed."""
WINDOW = 8
"""Steps of a mean."""
LINEARS_MOST, MODEL_MOST = 0.26, 0.41
"""Of bf16's bytes."""
LOADING_MOST = 1.3
"""Memory while loading, of what the model keeps, beside its largest tensor."""
APART_MOST = 0.05
"""Of LoRA's loss, by which QLoRA's may differ."""


def train(directory: Path, name: str, config: dict[str, Any], steps: int) -> list[dict[str, str]]:
    """A run of so many steps; what it logged of each."""
    path = directory / f"{name}.yaml"
    settings = {**config, "train": {**config["train"], "max_steps": steps, "save_every": steps, "run_dir": str(directory / name)}}
    path.write_text(json.dumps(settings))
    done = subprocess.run([sys.executable, "-m", "fw", "train", str(path)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{name}: fw train ended with {done.returncode}")
    with (directory / name / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def losses(rows: list[dict[str, str]], key: str) -> list[tuple[float, float]]:
    """By step."""
    return [(float(row["step"]), float(row[key])) for row in rows if row.get(key)]


def smooth(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means of :data:`WINDOW` steps, by the last of them."""
    return [(x, sum(y for _, y in points[n - WINDOW + 1 : n + 1]) / WINDOW) for n, (x, _) in enumerate(points) if n >= WINDOW - 1]


def picture(curves: dict[str, list[tuple[float, float]]]) -> str:
    """Both training losses, smoothed."""
    width, height, left, top, bottom = 860, 360, 64, 24, 46
    drawing = Drawing(width, height, "Training loss of LoRA and QLoRA by step")
    curves = {name: smooth(points) for name, points in curves.items()}
    every = [point for points in curves.values() for point in points]
    first, last, low, high = min(x for x, _ in every), max(x for x, _ in every), min(y for _, y in every), max(y for _, y in every)

    def at(point: tuple[float, float]) -> tuple[float, float]:
        x = left + (point[0] - first) / max(last - first, 1) * (width - left - 120)
        return x, height - bottom - (point[1] - low) / ((high - low) or 1) * (height - top - bottom)

    for part in range(5):
        value = low + (high - low) * part / 4
        (x0, y), (x1, _) = at((first, value)), at((last, value))
        drawing.shapes += [Line((x0, y), (x1, y)), Words(left - 8, y + 4, f"{value:.2f}", anchor="end", colour="soft")]
    for name, points in curves.items():
        ends = zip(points, points[1:], strict=False)
        drawing.shapes += [Line(at(one), at(other), STYLES[name][0], 2, STYLES[name][1]) for one, other in ends]
    for name, place in zip(curves, (0, 18), strict=True):
        drawing.shapes.append(Words(width - 112, top + 20 + place, name.upper().replace("LORA", "LoRA"), colour=STYLES[name][0], bold=True))
    drawing.shapes.append(Words(width - 120, height - 12, f"step {last:.0f}", anchor="end", colour="soft"))
    drawing.shapes.append(Words(left, height - 12, f"nats per token, means of {WINDOW} steps", colour="soft"))
    return drawing.svg()


def allowed_bytes(bytes_: dict[str, int]) -> float:
    """The most that loading may take."""
    return LOADING_MOST * bytes_["model"] + bytes_["largest"]


def apart(runs: dict[str, Any]) -> tuple[float, float]:
    """By how much of LoRA's losses QLoRA's differ: means in training at most, and those of held-out text at the end."""
    lora, qlora = runs["lora"], runs["qlora"]
    worst = max(abs(b / a - 1) for (_, a), (_, b) in zip(lora["smooth"], qlora["smooth"], strict=True))
    return worst, abs(qlora["val"][-1][1] / lora["val"][-1][1] - 1)


def broken(found: dict[str, Any]) -> list[str]:
    """Bounds that do not hold, a sentence each."""
    bytes_, said = found["bytes"], []
    for name, most in (("linears", LINEARS_MOST), ("model", MODEL_MOST)):
        if (share := bytes_[name] / bytes_[f"{name}_bf16"]) > most:
            said.append(f"{name}: {share:.4f} of the bytes in bf16, and {most} at most was to be")
    if bytes_["growth"] > allowed_bytes(bytes_):
        said.append(f"loading: {format_size(bytes_['growth'])}, and {format_size(int(allowed_bytes(bytes_)))} at most was to be")
    for name, run in found["runs"].items():
        if not run["smooth"][-1][1] < run["smooth"][0][1]:
            said.append(f"{name}: its loss does not fall, from {run['smooth'][0][1]:.3f} to {run['smooth'][-1][1]:.3f}")
    said += [
        f"qlora: its loss is {by:.2%} from lora's, and {APART_MOST:.0%} at most was to be" for by in apart(found["runs"]) if by > APART_MOST
    ]
    return said


def page(found: dict[str, Any], options: argparse.Namespace) -> str:
    """Markdown."""
    bytes_, runs = found["bytes"], found["runs"]
    allowed = allowed_bytes(bytes_)
    final = {name: (run["smooth"][-1][1], run["val"][-1][1]) for name, run in runs.items()}
    begin = {name: run["smooth"][0][1] for name, run in runs.items()}
    worst, at_the_end = apart(runs)
    rows = [
        ("linear layers, of their bf16 bytes", f"{bytes_['linears'] / bytes_['linears_bf16']:.4f}"),
        ("the whole model, embedding and head in bf16", f"{bytes_['model'] / bytes_['model_bf16']:.4f}"),
        (
            "memory while loading from bf16 (RssAnon, libraries loaded before)",
            f"{format_size(bytes_['growth'])}; the model keeps {format_size(bytes_['model'])}",
        ),
        ("the same, of 1.3 × the model + its largest tensor", f"{bytes_['growth'] / allowed:.2f}"),
    ]
    table = [f"| {name} | {value} |" for name, value in rows]
    trained = [
        f"| {name.upper().replace('LORA', 'LoRA')} | {begin[name]:.3f} | {final[name][0]:.3f} | {final[name][1]:.4f} |" for name in runs
    ]
    return "\n".join(
        [
            "# QLoRA beside LoRA",
            "",
            f"A Llama of {bytes_['parameters'] / 1e6:.0f} M parameters in 4 bits (nf4, double quantization). Made by `tools/bench qlora`",
            f"on {date.today()}: {machine()}.",
            "",
            "| | |",
            "| --- | --- |",
            *table,
            "",
            f"The base was trained for {options.base_steps} steps of 1,024 tokens of Python's documentation, to a loss of",
            f"{found['base']:.3f}. Adapters of rank 16 on all linear layers then learn from the sources of Python's library,",
            f"{options.steps} steps of 1,024 tokens, over the base in bf16 (LoRA) and over its codes (QLoRA); beginnings and rows are the",
            "same. Nats per token:",
            "",
            f"| | first {WINDOW} steps | last {WINDOW} steps | held-out text at the end |",
            "| --- | --- | --- | --- |",
            *trained,
            "",
            f"Means of {WINDOW} steps differ by {worst:.2%} at most, losses of held-out text by {at_the_end:.2%}.",
            "",
            "![training losses by step](qlora.svg)",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-steps", type=int, default=80, help="of the base (80)")
    parser.add_argument("--steps", type=int, default=60, help="of each adapter (60)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="directory of the page and the picture (docs)")
    options = parser.parse_args()
    if options.steps < WINDOW:
        parser.error(f"--steps: the least is {WINDOW}, of which means are taken")
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fw-qlora-") as made:
        directory = Path(made)
        base = train(directory, "base", BASE, options.base_steps)
        weights = str((directory / "base/checkpoints/latest").resolve())
        half = str(directory / "bf16")
        subprocess.run([sys.executable, "-m", "fw", "checkpoint", "export", weights, "--to", half, "--dtype", "bf16"], check=True)
        done = subprocess.run([sys.executable, "-c", LOADING, half], stdout=subprocess.PIPE, text=True, check=True)
        sources = [f"{LIBRARY}/{name}/*.py" for name in ("json", "email", "asyncio", "http", "logging", "unittest")]
        adapting = {
            **BASE,
            "model": {"name": "auto", "path": weights},
            "data": {"name": "text", "files": sources, "tokenizer": weights},
            "optimizer": {"name": "adamw", "lr": 1.0e-3},
            "peft": {"name": "lora", "rank": 16, "targets": ["all-linear"]},
            "train": {**BASE["train"], "val_every": options.steps},
        }
        runs: dict[str, Any] = {}
        for name, more in (("lora", {}), ("qlora", {"quantization": "nf4"})):
            rows = train(directory, name, {**adapting, **more}, options.steps)
            each = {"train": losses(rows, "loss"), "val": losses(rows, "val_loss")}
            runs[name] = {**each, "smooth": smooth(each["train"])}
    found = {"bytes": json.loads(done.stdout), "base": float(base[-1]["loss"]), "runs": runs}
    (options.out / "qlora.svg").write_text(picture({name: run["train"] for name, run in runs.items()}))
    text = page(found, options)
    (options.out / "qlora.md").write_text(text)
    print(text)
    if said := broken(found):
        raise SystemExit("\n".join(said))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
