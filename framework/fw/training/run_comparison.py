"""Runs beside one another: what was set otherwise, what came of it, and curves over each other."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fw.config import format_size
from fw.errors import UserError
from fw.meter.bars import bars
from fw.meter.document import COMPONENTS, MemoryDocument
from fw.training.chart import chart, points_of, smooth, thin
from fw.training.past_runs import PastRun, config_of, past_runs, rows_of, summary_of
from fw.training.report import STYLE
from fw.training.run_dir import MEMORY, METRICS

_OF_THE_RUN_ALONE = {"train.run_dir", "resume"}
_COLOURS = ("#2364aa", "#d1495b", "#2a9d8f", "#e8913a", "#8a6fb0", "#6b8f3c", "#c2509a", "#9aa5b1")
MOST = len(_COLOURS)
_CURVES = (("loss", "training loss, running mean"), ("val_loss", "validation loss"), ("tokens_per_s", "tokens/s"))


def _number(digits: int) -> Callable[[Any], str]:
    return lambda value: f"{value:,.{digits}f}"


_FIGURES: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "train_loss": ("training loss", _number(4)),
    "val_loss": ("validation loss", _number(4)),
    "val_bits_per_byte": ("validation bits per byte", _number(4)),
    "tokens": ("tokens", _number(0)),
    "tokens_per_s": ("tokens/s", _number(0)),
    "mfu": ("MFU", lambda value: f"{value:.1%}"),
    "peak_memory_bytes": ("peak memory of a rank", format_size),
    "skipped_steps": ("steps not made", _number(0)),
}


@dataclass(frozen=True)
class Compared:
    """Of runs, in the order in which they were named.

    Attributes:
        figures: by name a value for each run; None where it has none.
        memory: of each, bytes by component at the measured peak of the rank that took most; None where no step was measured.
        settings: what was set otherwise, by option; None where a run has no such option.
    """

    runs: Sequence[PastRun]
    figures: Mapping[str, Sequence[float | None]]
    memory: Sequence[Mapping[str, int] | None]
    settings: Mapping[str, Sequence[Any]]
    rows: Sequence[Sequence[Mapping[str, float]]]


def compare(directories: Sequence[Path]) -> Compared:
    """What is in their directories.

    Raises:
        UserError: one holds no run.
    """
    runs = []
    for directory in directories:
        found = past_runs([directory])
        if len(found) != 1:
            raise UserError(f"{directory} holds {len(found)} runs; name one" if found else f"{directory} holds no run")
        runs += found
    summaries = [summary_of(run.directory) for run in runs]
    rows = [rows_of(run.directory / METRICS) for run in runs]
    for summary, run in zip(summaries, runs, strict=True):
        if run.state != "finished":  # what there is is of an earlier end
            summary.clear()
            summary.update({"train_loss": run.loss, "val_loss": run.val_loss, "tokens_per_s": run.tokens_per_s})
    figures = {name: [summary.get(name) for summary in summaries] for name in _FIGURES}
    trees = [dict(_flat(config_of(run.directory))) for run in runs]
    names = sorted({name for tree in trees for name in tree} - _OF_THE_RUN_ALONE)
    settings = {name: [tree.get(name) for tree in trees] for name in names}
    return Compared(
        runs,
        {name: values for name, values in figures.items() if any(value is not None for value in values)},
        [_memory(run.directory) for run in runs],
        {name: values for name, values in settings.items() if any(value != values[0] for value in values)},
        rows,
    )


def _flat(tree: Any, name: str = "") -> list[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        return [each for key, value in tree.items() for each in _flat(value, f"{name}.{key}" if name else str(key))]
    return [(name, tree)]


def _memory(directory: Path) -> Mapping[str, int] | None:
    with suppress(OSError, ValueError, KeyError):
        document = MemoryDocument.from_json(json.loads((directory / MEMORY).read_text()))
        most = max(document.per_rank, key=lambda rank: rank.allocated_peak)
        return {component: most.at_peak[component] for component in COMPONENTS if most.at_peak.get(component)}
    return None


def lines(found: Compared) -> tuple[list[list[str]], list[list[str]]]:
    """Two tables: what came of the runs, and what was set otherwise; a name and a cell for each run in a row."""
    runs = found.runs
    told = [
        ["state", *(run.state for run in runs)],
        ["step", *("–" if run.step is None else f"{run.step}/{run.max_steps}" for run in runs)],
    ]
    told += [[_FIGURES[name][0], *_cells(values, _FIGURES[name][1])] for name, values in found.figures.items()]
    if any(found.memory):
        parts = [component for component in COMPONENTS if any(memory and memory.get(component) for memory in found.memory)]
        totals = [None if memory is None else sum(memory.values()) for memory in found.memory]
        told.append(["measured peak of a step", *_cells(totals, format_size)])
        told += [[f"  {part}", *_cells([memory and memory.get(part, 0) for memory in found.memory], format_size)] for part in parts]
    return told, [[name, *_cells(values, _setting)] for name, values in found.settings.items()]


def _cells(values: Sequence[Any], shown: Callable[[Any], str]) -> list[str]:
    return ["–" if value is None else shown(value) for value in values]


def _setting(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def page(found: Compared) -> str:
    """All of it, self-contained, with the curves."""
    names = [str(run.directory) for run in found.runs]
    colours = "".join(f".r{n} {{ stroke: {_COLOURS[n]}; fill: none; stroke-width: 2; }} " for n in range(len(names)))
    legend = " &nbsp; ".join(f"<span style='color:{_COLOURS[n]}'>━</span> {html.escape(name)}" for n, name in enumerate(names))
    came, otherwise = lines(found)
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{html.escape(' and '.join(names))}</title><style>{STYLE}\n{colours}</style></head><body>",
        "<h1>Runs beside one another</h1>",
        f"<p class='lead'>{legend}</p>",
    ]
    for key, label in _CURVES:
        series = [
            (f"r{n}", thin(smooth(points_of(rows, key)) if key == "loss" else points_of(rows, key))) for n, rows in enumerate(found.rows)
        ]
        if any(points for _, points in series):
            parts += [f"<h2>{label[0].upper()}{label[1:]}</h2>", chart(series, label, height=340 if key == "loss" else 240)]
    measured = [(name, memory) for name, memory in zip(names, found.memory, strict=True) if memory]
    if measured:
        parts += ["<h2>Memory at the peak of the measured step</h2>", bars(measured, list(COMPONENTS), "bytes by component")]
    parts += ["<h2>What came of them</h2>", _table(names, came), "<h2>What was set otherwise</h2>"]
    parts.append(_table(names, otherwise) if otherwise else "<p class='lead'>Nothing.</p>")
    return "\n".join([*parts, "</body></html>"]) + "\n"


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th scope='col'>{html.escape(name)}</th>" for name in ["", *names])
    body = "".join(
        f"<tr><th scope='row'>{html.escape(name)}</th>{''.join(f'<td class=n>{html.escape(cell)}</td>' for cell in cells)}</tr>"
        for name, *cells in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
