"""Memory techniques added to one run, one at a time: peak by category, speed, and the loss after some steps.

    tools/bench ladder                       the table and the picture of docs/ladder.md
    tools/bench ladder --of lora             those of docs/ladder-lora.md, and --of qlora
    tools/bench ladder --only bf16 --steps 4 --out ladder

Each rung is `fw train` in a process of its own, with everything of the rungs before it that it does not replace. Speed is relative to the
first rung of the same round, by the median of a round's steps.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from fw.meter.bars import bars
from fw.meter.step_memory import CATEGORIES
from ladder_page import Rung, page

ROOT = Path(__file__).parents[2]
MODEL = {
    "name": "llama",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 2048,
}
WARM_UP = 3
"""Steps that count in no speed, the measured one among them."""


RUNGS = [
    Rung("fp32, AdamW", {}),
    Rung("bf16", {"precision": "bf16"}),
    Rung("loss in chunks", {"objective.chunk_tokens": 256}),
    Rung("activation: selective", {"activation": "selective"}),
    Rung("activation: full", {"activation": "full"}),
    Rung("8-bit AdamW", {"optimizer": "{name: adamw_8bit, lr: 3e-4}"}),
    Rung("micro-batches of one", {"train.micro_batch_size": 1}),
    Rung(
        "in place of those: in_backward",
        {"optimizer.in_backward": True, "train.gradient_clip_norm": 0.0},
        drops=["train.micro_batch_size"],
    ),
    Rung("bf16 weights", {"precision": "bf16_true"}),
    Rung("optimizer on disk", {"offload.optimizer": "nvme"}),
    Rung("activations on disk", {"offload.activations": "nvme"}),
    Rung("fsdp on 2 ranks, each", {"sharding": "fsdp"}, ranks=2),
]
_WHOLE = Rung("all of the model, AdamW, bf16", {"precision": "bf16"})
_CHUNKS = Rung("loss in chunks", {"objective.chunk_tokens": 256})
_FULL = Rung("activation: full", {"activation": "full"})
_EIGHT = Rung("8-bit AdamW", {"optimizer": "{name: adamw_8bit, lr: 3e-3}"})
_RANKS = Rung("fsdp on 2 ranks, each", {"sharding": "fsdp"}, ranks=2)
_ADAPTERS = {"peft": "{name: lora, rank: 16}", "optimizer.lr": 3e-3}
LADDERS = {
    "full": RUNGS,
    "lora": [_WHOLE, Rung("LoRA", _ADAPTERS), _CHUNKS, _FULL, Rung("bf16 weights", {"precision": "bf16_true"}), _EIGHT, _RANKS],
    "qlora": [_WHOLE, Rung("QLoRA", {**_ADAPTERS, "quantization": "nf4"}), _CHUNKS, _FULL, _EIGHT, _RANKS],
}
"""What trains, by `--of`."""


def run(settings: dict[str, Any], ranks: int, options: argparse.Namespace, steps: int, directory: str) -> dict[str, Any]:
    """Train, and read what the run has left."""
    base = Path(directory) / "ladder.yaml"
    config = {
        "model": MODEL,
        "data": {"name": "text", "source": "python-docs", "vocab_size": 16384},
        "optimizer": {"name": "adamw", "lr": 3e-4},
        "schedule": {"name": "constant", "warmup_steps": 5},
        "train": {
            "global_batch_size": options.sequences,
            "sequence_length": options.length,
            "val_every": 0,
            "save_every": 0,
            "sample_tokens": 0,
        },
        "launch": {"accelerator": "cpu" if options.cpu else "auto"},
        "memory": {"measure_step": WARM_UP},
        "logger": ["csv"],
    }
    base.write_text(yaml.safe_dump(config))
    run_dir = Path(directory) / "run"
    subprocess.run(["rm", "-rf", str(run_dir)], check=True)
    settings = {**settings, "train.max_steps": steps, "train.run_dir": str(run_dir), "launch.devices": ranks}
    if any(value == "nvme" for value in settings.values()):
        settings["offload.path"] = str(Path(directory) / "disk")
    words = [f"{key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in settings.items()]
    done = subprocess.run([sys.executable, "-m", "fw", "train", str(base), *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}:\n{done.stderr[-3000:]}")
    with (run_dir / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    summary = json.loads((run_dir / "summary.json").read_text())
    return {
        "memory": summary["measured_step"],
        "tokens_per_s": statistics.median(float(row["tokens_per_s"]) for row in rows[WARM_UP:]),
        "loss": float(rows[-1]["loss"]),
        "steps": len(rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="of the first round, after which the loss is shown (20)")
    parser.add_argument("--rounds", type=int, default=2, help="the others are for speed alone, and have half the steps (2)")
    parser.add_argument("--sequences", type=int, default=4, help="sequences of a step (4)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence (512)")
    parser.add_argument("--of", choices=LADDERS, default="full", help="what trains: all of the model (full), or adapters")
    parser.add_argument("--only", default="", help="rungs whose label contains this, and the first")
    parser.add_argument("--cpu", action=argparse.BooleanOptionalAction, default=False, help="also where there is a GPU")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="directory of the page and the picture (docs)")
    parser.add_argument("--add", action="store_true", help="rounds to those that have left a .json in OUT")
    options = parser.parse_args()
    climbed: dict[str, tuple[dict[str, Any], Rung]] = {}
    settings: dict[str, Any] = {}
    rungs = LADDERS[options.of]
    for rung in rungs:
        settings = {key: value for key, value in {**settings, **rung.sets}.items() if key not in rung.drops}
        if "optimizer" in rung.sets:
            settings.pop("optimizer.lr", None)
        if rung is rungs[0] or options.only in rung.label:
            climbed[rung.label] = settings, rung
    options.out.mkdir(parents=True, exist_ok=True)
    stem = "ladder" if options.of == "full" else f"ladder-{options.of}"
    kept = options.out / f"{stem}.json"
    results: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if options.add else {}
    with tempfile.TemporaryDirectory() as directory, tqdm(total=len(climbed) * options.rounds, unit="run") as bar:
        for _ in range(options.rounds):
            steps = options.steps if not results or len(results) < len(climbed) else max(WARM_UP + 3, options.steps // 2)
            first = None
            for label, (settings, rung) in climbed.items():
                bar.set_postfix_str(label)
                found = run(settings, rung.ranks, options, steps, directory)
                first = first or found["tokens_per_s"]
                results.setdefault(label, {**found, "speeds": []})["speeds"].append(found["tokens_per_s"] / first)
                kept.write_text(json.dumps(results))
                bar.update()
    for found in results.values():
        found["speed"] = statistics.mean(found["speeds"])
        found["spread"] = max(found["speeds"]) - min(found["speeds"])
    (options.out / f"{stem}.md").write_text(page(results, [rung for _, rung in climbed.values()], MODEL, options))
    stacked = [(label, found["memory"]["by_category"]) for label, found in results.items()]
    (options.out / f"{stem}.svg").write_text(bars(stacked, list(CATEGORIES), "Peak of a training step by category, technique by technique"))
    print((options.out / f"{stem}.md").read_text())


main()
