"""docs/ladder.md from what `tools/bench ladder` has found."""

from __future__ import annotations

import argparse
import json
import os
import platform
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import torch

LOAD = os.getloadavg()[0]
_ABOUT = {
    "full": ("The memory ladder", "Adapters: [LoRA](ladder-lora.md), [QLoRA](ladder-qlora.md)."),
    "lora": ("The memory ladder of LoRA", "All of the model: [the ladder](ladder.md); over four bits: [QLoRA](ladder-qlora.md)."),
    "qlora": ("The memory ladder of QLoRA", "All of the model: [the ladder](ladder.md); over whole weights: [LoRA](ladder-lora.md)."),
}
"""Title of the page, and where the others are, by what trains."""
COLUMNS = {
    "weights": ("weights", "gathered weights", "weight copies"),
    "optimizer state": ("optimizer state",),
    "gradients": ("gradients",),
    "activations": ("activations",),
    "head and loss": ("head and loss",),
    "temporary": ("temporary", "exchanged", "buffers", "inputs", "other"),
}
LEGEND = """
Bytes are by the allocator's own events in the third step (`memory.measure_step=3`), of the rank that took most. Weights include gathered
ones and copies in the compute dtype; activations are what blocks leave for backward; head and loss what final norm, head and loss leave;
temporary is all else: results on their way, gradients of activations, what is recomputed. tokens/s are relative to the first row of the
same round, {of_rounds}. Losses differ where the arithmetic does."""
_OF_ALL = """ On a CPU the host is the device: what a GPU gives to host memory (`offload.optimizer=cpu`) saves nothing here, so the rows on
offloading use the disk; and the 8-bit update, many passes over all parameters, takes longer than forward and backward on two cores."""


@dataclass
class Rung:
    """One technique: what is set, and what of the rungs before no longer holds."""

    label: str
    sets: dict[str, Any]
    drops: list[str] = field(default_factory=list)
    ranks: int = 1

    def described(self) -> str:
        """As a line of a list."""
        sets = [f"`{key}={json.dumps(value) if isinstance(value, bool) else value}`" for key, value in self.sets.items()]
        sets += [f"`launch.devices={self.ranks}`"] if self.ranks > 1 else []
        dropped = "; without " + ", ".join(f"`{name}`" for name in self.drops) if self.drops else ""
        return f"- {self.label}: {', '.join(sets) or 'nothing but the model'}{dropped}"


def page(results: Mapping[str, Mapping[str, Any]], rungs: Sequence[Rung], model: Mapping[str, Any], options: argparse.Namespace) -> str:
    """Markdown.

    Args:
        results: by label, what was found of each rung: memory, speed, spread, loss, steps.
    """
    first = next(iter(results.values()))
    parameters = first["memory"]["by_category"]["weights"] / 4e6
    blocks = f"{model['num_hidden_layers']} blocks of width {model['hidden_size']}"
    of = "" if options.of == "full" else f" --of {options.of}"
    intro = (
        f"One model of {parameters:.0f} million parameters (Llama, {blocks}, 16,384 ids), one batch of {options.sequences} sequences of"
        f" {options.length} tokens, and one technique after another: each row has everything of the rows above but for what it"
        f" replaces. Made by `tools/bench ladder{of}` on {date.today()}: {machine()}."
    )
    title, others = _ABOUT[options.of]
    picture = "ladder.svg" if options.of == "full" else f"ladder-{options.of}.svg"
    lines = [
        f"# {title}",
        "",
        *_wrapped(intro),
        "",
        others,
        "",
        f"![Peak of a training step by category]({picture})",
        "",
        f"| MiB at the peak of a step | all | {' | '.join(COLUMNS)} | peak in | tokens/s | loss after {first['steps']} steps |",
        "|---|" + "---|" * (len(COLUMNS) + 4),
    ]
    for label, found in results.items():
        memory = found["memory"]
        parts = [sum(memory["by_category"][c] for c in column) / 2**20 for column in COLUMNS.values()]
        numbers = " | ".join(f"{part:,.0f}" for part in (memory["peak_bytes"] / 2**20, *parts))
        lines.append(f"| {label} | {numbers} | {memory['phase']} | {found['speed']:.2f} | {found['loss']:.4f} |")
    lines += ["", "What each row sets:", "", *(rung.described() for rung in rungs), ""]
    spread, rounds = max(found["spread"] for found in results.values()), len(first["speeds"])
    of_rounds = f"the mean of {rounds} rounds, which differ by {spread:.2f} at most" if rounds > 1 else "of which there was one"
    lines += _wrapped(LEGEND.format(of_rounds=of_rounds) + (_OF_ALL if options.of == "full" else ""))
    return "\n".join(lines) + "\n"


def machine() -> str:
    """In words."""
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), torch {torch.__version__}, load average before {LOAD:.1f}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), 140)
