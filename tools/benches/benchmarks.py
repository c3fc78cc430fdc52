"""docs/benchmarks.json, what was measured beside peers, and docs/benchmarks.md, which is made of it alone."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from fw.meter.drawing import Drawing, Words

DOCS = Path(__file__).parents[2] / "docs"
MARKS = {
    "tokens/s": 1.25,
    "of its products": 0.80,
    "allocated": 0.75,
    "resident": 0.90,
}
"""What training aims at: tokens per second of the best peer's, of what its products alone allow (bf16), bytes of the leanest peer's."""
INTRO = """# Beside other programs

The same model, batches and machine, one program at a time, in rounds; medians, and what they spread over. `tools/bench setup-peers` makes
the environments, `tools/bench training --write`, `tools/bench overhead --write` and `tools/bench growth --write` measure all of this
anew, on the machine they run on; `tools/bench check` says whether fw has fallen behind what is here. Why it is so:
[where a step's time goes](performance.md).
"""
TRAINING = """## Training

Random weights of a Llama, 20 steps, AdamW whose state is in fp32, gradients clipped; where adapters train (rank 16, on all linear layers),
the base is in bf16, or in 4 bits (nf4, double quantization). **Products**: of the tokens per second that the step's matrix products alone
would allow, measured in the same round; above 1 where fw's own kernels are faster than torch's. **Allocated**: at most from the second step
on, by the events of torch's allocator. **Resident**: the most that a process had. Peers run as their documentation shows: transformers and
litgpt under autocast, peft over transformers, torch's `fully_shard` over transformers, accelerate (which on a CPU divides
nothing), `torch.compile` of the whole model where it says compiled; fw compiles blocks, and where it says lean its blocks keep the
results of products and attention alone (`activation={name: selective, matmul_every: 1}`), with logits of 256 tokens at a time; selective is
`activation=selective`, which keeps each second product's; with 16-bit gradients they wait for the update as backward's products give them
(`precision={name: bf16, accumulate: bf16}`).

![tokens per second of fw, of the best peer's](benchmarks.svg)
"""
OVERHEAD = """## Beside a bare loop

`fw train` with its meter, progress and logger against a plain PyTorch loop over the same model and batches, each in a process of its own,
in turns; both by torch's operators (`FW_TRAINING_KERNELS=off`).

| | fw, of the loop's tokens/s | spread | on |
| --- | --- | --- | --- |
"""
GROWTH = """## How it grows

A Llama of width 256, 4 layers, vocabulary 8,192, rows of 512 tokens, 16,384 tokens a step, bf16; one of these changes at a time. Squares
are what was measured, one run each; lines are theory: of time the operations that the model counts, at the rate of the second point, of
bytes the plan. Longer sequences cost more as attention does; more ranks share the same cores, and divide the state.

![tokens per second and bytes against what they grow with](benchmarks-growth.svg)
"""


def keep(bench: str, case: str, found: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Put a case's figures in the place of earlier ones, and make the page anew."""
    file = DOCS / "benchmarks.json"
    kept: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    whole = {**found, "date": str(date.today()), "commit": _commit(), **about}
    kept.setdefault(bench, {}).setdefault(machine(), {})[case] = whole
    file.write_text(json.dumps(kept, indent=1) + "\n")
    write(kept)


def write(kept: Mapping[str, Any]) -> None:
    """The page and its pictures."""
    import growth  # which measures with what keeps its figures here

    (DOCS / "benchmarks.md").write_text(page(kept))
    if "training" in kept:
        (DOCS / "benchmarks.svg").write_text(picture(kept["training"]).svg("benchmarks"))
    if "growth" in kept:
        points = {axis: case["points"] for axis, case in latest(kept["growth"])[1].items()}
        (DOCS / "benchmarks-growth.svg").write_text(growth.picture(points).svg("benchmarks-growth"))


def page(kept: Mapping[str, Any]) -> str:
    """Markdown."""
    import growth

    lines = [INTRO]
    if "training" in kept:
        lines.append(TRAINING)
    for where, cases in kept.get("training", {}).items():
        lines += [f"### On {where}", ""]
        for name, case in cases.items():
            versions = ", ".join(f"{package} {version}" for package, version in case["versions"].items())
            lines += [f"#### {name}", "", *table(case), ""]
            lines += [f"fw at {case['commit']}, {case['date']}, {_rounds(len(case['products']))}, {versions}. {said(case)}", ""]
    if "overhead" in kept:
        rows = [_overhead(name, case["ratios"], where) for where, cases in kept["overhead"].items() for name, case in cases.items()]
        lines += [OVERHEAD + "\n".join(rows), ""]
    if "growth" in kept:
        where, cases = latest(kept["growth"])
        lines.append(GROWTH)
        for axis, case in cases.items():
            lines += [*growth.table(axis, case["points"]), ""]
        lines += [f"{where}; {_when(cases)}.", ""]
    return "\n".join(lines).rstrip() + "\n"


def latest(machines: Mapping[str, Mapping[str, Any]]) -> tuple[str, Mapping[str, Any]]:
    """The machine on which these were last measured, and what was found."""
    return max(machines.items(), key=lambda of: max(case["date"] for case in of[1].values()))


def _rounds(number: int) -> str:
    return "one round" if number == 1 else f"{number} rounds"


def _overhead(name: str, ratios: Sequence[float], where: str) -> str:
    return f"| {name} | {median(ratios):.3f} | {min(ratios):.3f} to {max(ratios):.3f} | {where} |"


def _when(cases: Mapping[str, Any]) -> str:
    return "; ".join(sorted({f"fw at {case['commit']}, {case['date']}" for case in cases.values()}))


def table(case: Mapping[str, Any]) -> list[str]:
    """Of a case, in Markdown."""
    products = median(case["products"])
    lines = ["| | tokens/s | spread | products | last loss | allocated | resident |", "|" + " --- |" * 7]
    for way, figures in case["ways"].items():
        rates = figures["tokens/s"]
        spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
        memory = [f"{median(figures[name]):,.0f} MiB" if name in figures else "" for name in ("allocated", "resident")]
        share = f"{median(rates) / products:.2f}"
        lines.append(f"| {way} | {median(rates):,.0f} | {spread} | {share} | {median(figures['loss']):.3f} | {' | '.join(memory)} |")
    return lines


def ratios(case: Mapping[str, Any]) -> dict[str, float]:
    """Of fw's fastest way: tokens per second by the best peer's, by those of its products; bytes of fw's leanest by the leanest peer's."""
    ways = {way: {name: median(values) for name, values in figures.items()} for way, figures in case["ways"].items()}
    ours, others = ([each for way, each in ways.items() if way.startswith("fw") is own] for own in (True, False))
    if not ours:
        return {}
    best = max(each["tokens/s"] for each in ours)
    found = {"of its products": best / median(case["products"])}
    if others:
        found["tokens/s"] = best / max(each["tokens/s"] for each in others)
        for name in ("allocated", "resident"):
            own, least = _least(ours, name), _least(others, name)
            if own is not None and least:
                found[name] = own / least
    return found


def _least(ways: Iterable[Mapping[str, float]], name: str) -> float | None:
    return min((way[name] for way in ways if name in way), default=None)


def said(case: Mapping[str, Any]) -> str:
    """The ratios in words, and whether each is what is aimed at."""
    found = ratios(case)
    words = {
        "tokens/s": "{:.2f} × the best peer's tokens per second",
        "of its products": "{:.2f} of what its products allow",
        "allocated": "{:.2f} of the leanest peer's allocated bytes",
        "resident": "{:.2f} of its resident ones",
    }
    return (
        "fw: "
        + ", ".join(f"{text.format(found[name])} ({_against(name, found[name])})" for name, text in words.items() if name in found)
        + "."
    )


def _against(name: str, value: float) -> str:
    mark = MARKS[name]
    reached = value <= mark if name in ("allocated", "resident") else value >= mark
    return f"{mark:g} {'reached' if reached else 'not reached'}"


def picture(machines: Mapping[str, Mapping[str, Any]]) -> Drawing:
    """fw's tokens per second by the best peer's, a bar for each case, those of a machine together, and the mark."""
    rows: list[tuple[str, float | None]] = []
    for where, cases in machines.items():
        rows.append((where, None))
        rows += [(name, found["tokens/s"]) for name, case in cases.items() if "tokens/s" in (found := ratios(case))]
    left, step, width = 230, 34, 900
    most = max([MARKS["tokens/s"], *(value for _, value in rows if value is not None)]) * 1.1
    scale = (width - left - 70) / most
    drawing = Drawing(width, 60 + step * len(rows), "tokens per second of fw, of the best peer's")
    for mark, words, anchor in ((1.0, "the best peer", "end"), (MARKS["tokens/s"], "aimed at", "start")):
        drawing.rectangle(left + mark * scale, 26, 1.5, step * len(rows) + 8, "soft")
        drawing.shapes.append(Words(left + mark * scale, 18, f"{words} {mark:g}", anchor, "soft"))
    for number, (name, value) in enumerate(rows):
        y = 34 + number * step
        if value is None:
            drawing.shapes.append(Words(16, y + 19, name, bold=True))
            continue
        drawing.rectangle(left, y, value * scale, 20, "#2364aa" if value >= 1 else "#d1495b")
        drawing.shapes += [Words(left - 10, y + 15, name, "end"), Words(left + value * scale + 8, y + 15, f"{value:.2f}", bold=True)]
    return drawing


def machine() -> str:
    """In words; what a hypervisor calls alike differs by its family."""
    told = dict(reversed([[part.strip() for part in line.split(":", 1)] for line in _lines("/proc/cpuinfo") if ":" in line]))
    model, flags = told.get("model name", platform.machine()), told.get("flags", "").split()
    model += f", family {told['cpu family']}" if model == "AMD EPYC" and "cpu family" in told else ""
    known = [name for name, flag in (("AVX-512", "avx512f"), ("bf16", "avx512_bf16"), ("AMX", "amx_bf16")) if flag in flags]
    return f"{os.cpu_count()} cores ({', '.join([model, *known])})"


def _lines(file: str) -> list[str]:
    return Path(file).read_text().splitlines() if Path(file).exists() else []


def _commit() -> str:
    """With ``-dirty`` where what is measured is not what was committed; the page itself may be anew."""

    def said(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=DOCS.parent, capture_output=True, text=True, check=True).stdout.strip()

    changed = said("status", "--porcelain", "--", "framework", "plugins", "models")
    return said("describe", "--always", "--exclude=*") + ("-dirty" if changed else "")


if __name__ == "__main__":
    write(json.loads((DOCS / "benchmarks.json").read_text()))
