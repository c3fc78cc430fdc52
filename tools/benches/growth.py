"""How tokens per second and bytes of `fw train` grow with sequences, layers, vocabulary and ranks, beside what theory says.

    tools/bench growth [--axes …] [--steps 6] [--write]

Each point is a run of its own; bytes are the most that torch's allocator has given out on the rank that takes most, from the second step
on, by its events. Of time theory is the operations of a token (the model's own count), at the rate of an axis' second point; of bytes the
plan. `--write` keeps all in docs/benchmarks.json and its page.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from tqdm import tqdm

import benchmarks
from fw.config import load
from fw.meter.drawing import Drawing, Line, Words
from fw.planning.plan import plan
from fw.recipe import resolve
from peers import check_quiet
from training import WARM_UP, fw_allocated, fw_trained

TOKENS = 16384
"""Of a step, in rows of one sequence."""
MODEL = {
    "name": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
    "max_position_embeddings": TOKENS,
}
Point = dict[str, float]
"""x, and measured and expected tokens per second and bytes."""


def _length(x: int) -> list[str]:
    return [f"train.sequence_length={x}", f"train.global_batch_size={TOKENS // x}"]


def _layers(x: int) -> list[str]:
    return [f"model.num_hidden_layers={x}"]


def _vocabulary(x: int) -> list[str]:
    return [f"model.vocab_size={x}", f"data.vocab_size={x}"]


def _ranks(x: int) -> list[str]:
    return [f"launch.devices={x}", "sharding=fsdp"] if x > 1 else []


AXES = {
    "tokens in a sequence": ((512, 1024, 2048, 4096, 8192, 16384), _length),
    "layers": ((2, 4, 8, 16, 32), _layers),
    "vocabulary": ((8192, 32768, 131072, 262144), _vocabulary),
    "ranks (fsdp)": ((1, 2, 4), _ranks),
}
"""By name: where it is measured, and what overrides make of a point."""


def config(place: Path, steps: int) -> Path:
    """Of all runs, as a YAML file."""
    tree = {
        "model": MODEL,
        "data": {"name": "synthetic", "vocab_size": MODEL["vocab_size"], "samples": steps * TOKENS // 512},
        "objective": {"name": "causal_lm", "chunk_tokens": 512},
        "precision": "bf16",
        "optimizer": {"name": "adamw", "lr": 3e-4},
        "schedule": "constant",
        "train": {
            "max_steps": steps,
            "global_batch_size": TOKENS // 512,
            "micro_batch_size": 1,
            "sequence_length": 512,
            "val_every": 0,
            "save_every": 0,
            "sample_tokens": 0,
            "run_dir": str(place / "run"),
        },
        "memory": {"measure_step": 0},
        "launch": {"accelerator": "cpu", "devices": 1},
        "logger": ["csv"],
    }
    file = place / "training.yaml"
    file.write_text(yaml.safe_dump(tree, sort_keys=False))
    return file


def operations(file: Path, overrides: Sequence[str]) -> float:
    """Of a token, forward and backward, as the model counts them."""
    recipe = resolve(load(file, [*overrides, "launch.devices=1", "sharding=single"]))
    with torch.device("meta"):
        model = recipe.model.build(recipe.model.vocab_size or 0, recipe.train.sequence_length, recipe.attention)
    return model.flops_per_token(recipe.train.sequence_length)


def measure(axis: str, file: Path, busy: bool) -> list[Point]:
    """Its points, in order."""
    places, overriding = AXES[axis]
    points: list[Point] = []
    for x in tqdm(places, desc=axis, unit="run"):
        if not busy:
            check_quiet()
        overrides = overriding(x)
        trained, took = fw_trained(file.parent, overrides), fw_allocated(file.parent, overrides)
        planned = plan(str(file), *overrides).largest.allocated_peak / 2**20
        points.append(
            {
                "x": x,
                "tokens/s": trained["tokens/s"],
                "operations": operations(file, overrides),
                "allocated": took["allocated"],
                "planned": planned,
            }
        )
    rate = points[1]["tokens/s"] * points[1]["operations"]
    return [{**point, "expected": rate / point["operations"]} for point in points]


def slope(points: Sequence[Mapping[str, float]], name: str) -> float:
    """Of its logarithm against that of x, between the last two points."""
    before, last = points[-2:]
    return math.log(last[name] / before[name]) / math.log(last["x"] / before["x"])


def table(axis: str, points: Sequence[Mapping[str, float]]) -> list[str]:
    """In Markdown."""
    lines = [f"| {axis} | tokens/s | by operations | allocated | planned |", "|" + " --- |" * 5]
    for each in points:
        rates = f"{each['tokens/s']:,.0f} | {each['expected']:,.0f}"
        lines.append(f"| {each['x']:,.0f} | {rates} | {each['allocated']:,.1f} MiB | {each['planned']:,.1f} MiB |")
    slopes = [f"{slope(points, name):.2f}" for name in ("tokens/s", "expected", "allocated", "planned")]
    return [*lines, f"| *last slope* | {' | '.join(slopes)} |"]


def picture(axes: Mapping[str, Sequence[Mapping[str, float]]]) -> Drawing:
    """A panel for each axis, tokens per second above and bytes below: lines of theory, crosses of what was measured; all logarithmic."""
    width, high, gap = 250, 190, 46
    drawing = Drawing(gap + len(axes) * (width + gap), 2 * (high + 70) + 20, "tokens per second and bytes against what they grow with")
    for column, (axis, points) in enumerate(axes.items()):
        for row, (measured, theory, unit) in enumerate((("tokens/s", "expected", "tokens/s"), ("allocated", "planned", "MiB"))):
            left, top = gap + column * (width + gap), 30 + row * (high + 70)
            _panel(drawing, points, (left, top, width, high), measured, theory)
            drawing.shapes.append(Words(left, top - 10, f"{unit} by {axis}", bold=True))
    return drawing


def _panel(drawing: Drawing, points: Sequence[Mapping[str, float]], place: tuple[int, int, int, int], measured: str, theory: str) -> None:
    left, top, width, high = place
    values = [point[name] for point in points for name in (measured, theory)]
    least, most = math.log(min(values) / 1.15), math.log(max(values) * 1.15)
    first, last = math.log(points[0]["x"]), math.log(points[-1]["x"])

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log(x) - first) / (last - first)
        return left + across * width, top + high - (math.log(y) - least) / (most - least) * high

    for point in points:
        x = at(point["x"], values[0])[0]
        drawing.shapes.append(Line((x, top), (x, top + high)))
        drawing.shapes.append(Words(x, top + high + 16, _short(point["x"]), "middle", "soft", 11))
    for before, after in zip(points, points[1:], strict=False):
        drawing.shapes.append(Line(at(before["x"], before[theory]), at(after["x"], after[theory]), "soft", 1.5, dashed=True))
    for point in points:
        x, y = at(point["x"], point[measured])
        drawing.rectangle(x - 4, y - 4, 8, 8, "#2364aa")
        drawing.shapes.append(Words(x, y - 8, _short(point[measured]), "middle", "ink", 11))


def _short(value: float) -> str:
    return f"{value / 1024:,.0f} Ki" if value >= 8192 and value % 1024 == 0 else f"{value:,.0f}"


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", nargs="+", default=list(AXES), choices=list(AXES), metavar="AXIS", help=f"of: {'; '.join(AXES)}")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--busy", action="store_true", help="measure also where others use the processors")
    parser.add_argument("--write", action="store_true", help="keep what was found in docs/benchmarks.json, and make its page anew")
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps: {options.steps} is too small; the first {WARM_UP} warm up")
    with tempfile.TemporaryDirectory() as directory:
        file = config(Path(directory), options.steps)
        for axis in options.axes:
            points = measure(axis, file, options.busy)
            print("\n".join(["", *table(axis, points), ""]), flush=True)
            if options.write:
                about: dict[str, Any] = {"command": "tools/bench growth --write", "steps": options.steps}
                benchmarks.keep("growth", axis, {"points": points}, about)


if __name__ == "__main__":
    sys.exit(main())
