"""docs/accuracy.md from what `tools/bench accuracy` has found."""

from __future__ import annotations

import os
import platform
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from accuracy_scatter import Dot
from accuracy_scores import TOLERANCE, Score, score, summarise
from accuracy_space import AXES
from fw.config import format_size

SINGLE, SEVERAL = "one process", "several ranks"
INTRO = """
`fw plan` against `fw profile` on configurations that were drawn by chance (`tools/bench accuracy --seed N`), each value of each knob in
turn. For each one `fw plan FILE --json` runs first, once, in an empty directory with an empty cache, and then `fw profile FILE --json`:
two steps (of each phase, where precision has phases) measured by the allocator's own events, in processes of their own, once for one
process and {repeats} times for several ranks, whose transfers overlap differently each time. Data are random ids. Nothing is fitted to
these measurements, and no configuration is left out but those listed below. {machine}. fw at {commits}, measured {dates}.
"""
LEGEND = f"""
Peak: of the rank that took most, from the second step on, over all measurements. Predicted: `allocated_peak_bytes`, as a range from
`allocated_peak_low_bytes` where the two differ. Error: (upper end of the prediction - highest measurement) ÷ highest measurement; below 0
where more was taken than predicted. Within: every measured peak lies in the predicted range, up to {TOLERANCE:.1%} of it. Bytes: whether
the maxima of parameters, gradients and optimizer state are right to the byte on every rank in every measurement, else which are not. Worst
component: the component whose maximum is furthest off on a rank, as part of the measured peak. A configuration: parameters (layers × width,
vocabulary), rows × tokens of a micro-batch (× micro-batches), sharding, precision, optimizer, and what is no default.
"""
COLUMNS = ("measured", "predicted", "error", "within", "peak in", "bytes", "worst component")
Entry = Mapping[str, Any]


def scored(entries: Sequence[Entry]) -> dict[int, list[Score]]:
    """Those that were measured, by seed."""
    found: dict[int, list[Score]] = {}
    for entry in entries:
        if entry["outcome"] == "measured":
            found.setdefault(entry["seed"], []).append(score(entry["label"], entry["plan"], entry["profiles"]))
    return found


def groups(scores: Sequence[Score]) -> dict[str, list[Score]]:
    """One process apart from several ranks; a group without any is left out."""
    parts = {SINGLE: [s for s in scores if s.ranks == 1], SEVERAL: [s for s in scores if s.ranks > 1]}
    return {name: part for name, part in parts.items() if part}


def dots(entries: Sequence[Entry]) -> dict[str, list[Dot]]:
    """For the picture."""
    everything = [each for scores in scored(entries).values() for each in scores]
    return {name: [(s.label, s.measured, s.error) for s in part] for name, part in groups(everything).items()}


def page(entries: Sequence[Entry], drawn: int | None = None) -> str:
    """Markdown.

    Args:
        entries: of the results file, at least one of them measured.
        drawn: configurations of these seeds, where not all are in the file yet.
    """
    by_seed = scored(entries)
    everything = [each for scores in by_seed.values() for each in scores]
    repeats = max((len(e["profiles"]) for e in entries if e["outcome"] == "measured" and len(e["plan"]["per_rank"]) > 1), default=0)
    intro = INTRO.format(
        repeats=repeats or "several",
        machine=machine(),
        commits=_listed(entry["commit"] for entry in entries),
        dates=_listed(entry["date"] for entry in entries),
    )
    lines = [
        "# Predicted and measured memory",
        "",
        *_wrapped(intro),
        "",
        "![Error of the predicted peak by measured peak](accuracy.svg)",
        "",
    ]
    if drawn is not None and drawn > len(entries):
        lines += [f"So far {len(entries)} of the {drawn} configurations that were drawn.", ""]
    lines += _summary(everything)
    lines += ["", *_wrapped(LEGEND)]
    for seed, scores in sorted(by_seed.items()):
        lines += ["", f"## Seed {seed}", "", f"| configuration | ranks | {' | '.join(COLUMNS)} |", "|---|" + "---|" * (len(COLUMNS) + 1)]
        lines += [_row(each) for each in scores]
    lines += ["", "## What was measured", "", "| axis | configurations by value |", "|---|---|"]
    lines += [f"| {axis} | {_counted(entries, axis)} |" for axis in AXES]
    failed = [entry for entry in entries if entry["outcome"] == "failed"]
    lines += ["", "## Failures", ""]
    lines += [f"- seed {e['seed']}: {e['label']}: {e['failure']}" for e in failed] or ["None: whatever `fw plan` accepted was measured."]
    refusals = Counter(sentence for entry in entries for sentence in entry["refused"])
    lines += ["", "## Refusals", "", *_wrapped(REFUSALS.format(number=sum(refusals.values()))), ""]
    lines += [f"- {number} × {sentence}" for sentence, number in refusals.most_common()]
    return "\n".join(lines).rstrip("\n") + "\n"


REFUSALS = """
{number} configurations were refused by `fw plan` with a sentence, or would not have fitted this machine, and another was drawn in the place
of each.
"""


def _summary(scores: Sequence[Score]) -> list[str]:
    parts = {name: summarise(part) for name, part in groups(scores).items()}
    rows = {
        "configurations": [str(s.number) for s in parts.values()],
        "median absolute error": [f"{s.median:.3%}" for s in parts.values()],
        "95th percentile of the absolute error": [f"{s.percentile95:.3%}" for s in parts.values()],
        "worst underestimate": [f"{s.underestimate:.3%}" if s.underestimate else "none" for s in parts.values()],
        "upper end above the highest measurement, median": [f"{s.median_above:+.3%}" for s in parts.values()],
        "upper end above the highest measurement, most": [f"{s.overestimate:+.3%}" if s.overestimate else "never" for s in parts.values()],
        "all measured peaks within the predicted range": [f"{s.within:.0%}" for s in parts.values()],
        "phase of the peak right": [f"{s.phases:.0%}" for s in parts.values()],
        "parameters, gradients, optimizer to the byte": [f"{s.exact:.0%}" for s in parts.values()],
    }
    lines = [f"| | {' | '.join(parts)} |", "|---|" + "---|" * len(parts)]
    return lines + [f"| {name} | {' | '.join(values)} |" for name, values in rows.items()]


def _row(each: Score) -> str:
    predicted = format_size(each.high) if each.low == each.high else f"{format_size(each.low)} to {format_size(each.high)}"
    phase = each.measured_phase if each.predicted_phase == each.measured_phase else f"{each.measured_phase}, not {each.predicted_phase}"
    cells = [
        each.label,
        str(each.ranks),
        format_size(each.measured),
        predicted,
        f"{each.error:+.3%}",
        "yes" if each.within else "**no**",
        phase,
        f"**{', '.join(each.off)}**" if each.off else "exact",
        f"{each.component} {each.component_error:+.3%}" if each.component_error else "none",
    ]
    return f"| {' | '.join(cells)} |"


def _counted(entries: Sequence[Entry], axis: str) -> str:
    found = Counter(entry["choices"][axis] for entry in entries if entry["outcome"] == "measured")
    return ", ".join(f"{value} {found[value]}" for value in AXES[axis])


def machine() -> str:
    """In words."""
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), torch {torch.__version__}"


def _listed(words: Any) -> str:
    return ", ".join(sorted(set(words)))


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), 140)
