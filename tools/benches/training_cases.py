"""What `tools/bench training` trains: shapes, what of a model learns, and how many processes; fw's config of each."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from random_llama import Shape

SMALL = Shape(layers=8, hidden=512, inner=1376, heads=8, kv_heads=4)
LARGE = Shape()
CHUNK = 512
"""Tokens whose logits fw has at a time: as fast as all at once, and a quarter of the bytes."""
LORA = {"name": "lora", "rank": 16, "alpha": 32, "targets": ["all-linear"]}
OVERRIDES = {
    "fw": [],
    "fw, compiled": ["train.compile=true"],
    "fw, lean": ["activation={name: selective, matmul_every: 1}", f"objective.chunk_tokens={CHUNK // 2}"],
    "fw, selective": ["activation=selective"],
    "fw, 16-bit gradients": ["precision={name: bf16, accumulate: bf16}"],
}
"""Of fw's ways. Lean: blocks keep results of products and of attention alone, and half the logits are there at a time. Selective: of
products each second result. 16-bit gradients: as backward's products give them, until the update."""
_PEERS = ("transformers", "transformers, compiled", "litgpt", "litgpt, compiled")
_WHOLE = ("fw", "fw, compiled", "fw, lean", *_PEERS)
_ADAPTERS = ("fw", "fw, compiled", "fw, selective", "peft", "peft, compiled")
_RANKS = ("fw", "fw, compiled", "torch fully_shard", "torch fully_shard, compiled", "accelerate's DDP")


@dataclass(frozen=True)
class Case:
    """A run that all programs do alike.

    Attributes:
        trains: ``all``, or adapters over a base in 16 bits (``lora``) or in 4 (``qlora``).
        recomputed: of each block its input stays, and backward computes the rest again.
        ranks: processes that divide parameters, gradients and optimizer state.
        ways: programs, each eager and compiled where it has that.
    """

    shape: Shape
    precision: str
    rows: int = 4
    length: int = 512
    trains: str = "all"
    recomputed: bool = False
    ranks: int = 1
    ways: tuple[str, ...] = field(default=_WHOLE)

    def spec(self, way: str, place: Path, memory: bool) -> dict[str, Any]:
        """For the script of a peer."""
        program, _, compiled = way.partition(", ")
        told = {name: value for name, value in asdict(self).items() if name not in ("shape", "ways")}
        return {**told, "program": program, "compiled": bool(compiled), "place": str(place), "memory": memory}


CASES = {
    "56 M, bf16": Case(SMALL, "bf16"),
    "56 M, fp32": Case(SMALL, "fp32"),
    "336 M, bf16": Case(LARGE, "bf16", rows=1),
    "336 M, LoRA, bf16": Case(LARGE, "bf16", rows=1, trains="lora", ways=_ADAPTERS),
    "336 M, QLoRA, bf16": Case(LARGE, "bf16", rows=1, trains="qlora", ways=_ADAPTERS),
    "56 M, recomputed, bf16": Case(SMALL, "bf16", recomputed=True, ways=("fw", "fw, compiled", "fw, 16-bit gradients", *_PEERS)),
    "56 M, two ranks, bf16": Case(SMALL, "bf16", ranks=2, ways=_RANKS),
}


def config(case: Case, place: Path, steps: int) -> Path:
    """fw's run of it, as a YAML file beside the model."""
    tree: dict[str, Any] = {
        "model": {"name": "auto", "path": str(place / "model")},
        "data": {"name": "synthetic", "vocab_size": case.shape.vocabulary, "samples": case.rows * steps},
        "objective": {"name": "causal_lm", "chunk_tokens": CHUNK},
        "precision": case.precision,
        "optimizer": {"name": "adamw", "lr": 3e-4},
        "schedule": "constant",
        "train": {
            "max_steps": steps,
            "global_batch_size": case.rows,
            "micro_batch_size": case.rows // case.ranks,
            "sequence_length": case.length,
            "val_every": 0,
            "save_every": 0,
            "sample_tokens": 0,
            "run_dir": str(place / "run"),
        },
        "memory": {"measure_step": 0},
        "launch": {"accelerator": "cpu", "devices": case.ranks},
        "logger": ["csv"],
    }
    if case.trains != "all":
        tree["peft"] = LORA
    if case.trains == "qlora":
        tree["quantization"] = {"name": "nf4", "double_quantization": True}
    if case.recomputed:
        tree["activation"] = "full"
    if case.ranks > 1:
        tree["sharding"] = "fsdp"
    file = place / "training.yaml"
    file.write_text(yaml.safe_dump(tree, sort_keys=False))
    return file
