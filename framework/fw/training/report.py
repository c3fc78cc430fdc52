"""``report.html``: a run on one page, self-contained, no script and no outside request."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from fw.meter.bars import bars
from fw.meter.step_memory import CATEGORIES
from fw.training.chart import chart, points_of, smooth, thin

STYLE = """
:root { color-scheme: light dark; --ink: #1c2733; --soft: #66788a; --line: #dfe5ea; --paper: #fff; --a: #2364aa; --b: #d1495b;
  --c: #2a9d8f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #93a3b3; --line: #2f3b47; --paper: #12181f; --a: #6cb0ff; --b: #ff8794; --c: #5fd3c3; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 940px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
p.lead { color: var(--soft); margin-top: 0; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .25rem 1.5rem .25rem 0; border-bottom: 1px solid var(--line); }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
pre { background: color-mix(in srgb, var(--soft) 12%, transparent); padding: .8rem 1rem; overflow-x: auto; white-space: pre-wrap;
  border-radius: 6px; }
svg { width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 12px; } .grid { stroke: var(--line); }
.train { stroke: var(--a); fill: none; stroke-width: 1.2; opacity: .45; } .smooth { stroke: var(--a); fill: none; stroke-width: 2.2; }
.val { stroke: var(--b); fill: none; stroke-width: 2; } .dot { fill: var(--b); } .lr { stroke: var(--c); fill: none; stroke-width: 1.5; }
""".strip()


def render(
    title: str,
    summary: Sequence[tuple[str, str]],
    rows: Sequence[Mapping[str, Any]],
    sample: str,
    config_yaml: str,
    measured: Mapping[str, Any] | None = None,
) -> str:
    """The page.

    Args:
        summary: label and value of each line of the table.
        rows: the metrics that were logged.
        sample: text from the model, or empty.
        measured: the step whose memory was measured: its number, and bytes by category at the peak.
    """
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        "<h2>Loss</h2>",
        _loss_chart(rows),
        "<h2>Summary</h2><table>",
        *(f"<tr><th scope='row'>{html.escape(k)}</th><td class='n'>{html.escape(v)}</td></tr>" for k, v in summary),
        "</table>",
    ]
    if any(row.get("lr") is not None for row in rows):
        parts += [
            "<h2>Learning rate</h2>",
            chart([("lr", points_of(rows, "lr"))], "learning rate", height=180, floor=0.0),
        ]
    if measured:
        bar = bars([(f"step {measured['step']}", measured["by_category"])], list(CATEGORIES), "bytes by category")
        parts += [f"<h2>Memory at the peak of step {measured['step']}, in {measured['phase']}</h2>", bar]
    if sample:
        parts += ["<h2>Sample</h2>", f"<pre>{html.escape(sample)}</pre>"]
    parts += ["<h2>Configuration</h2>", f"<pre>{html.escape(config_yaml)}</pre>", "</body></html>"]
    return "\n".join(parts) + "\n"


def _loss_chart(rows: Sequence[Mapping[str, Any]]) -> str:
    train, val = points_of(rows, "loss"), points_of(rows, "val_loss")
    series = [("train", thin(train)), ("smooth", thin(smooth(train))), ("val", val)]
    legend = "<p class='lead'><span style='color:var(--a)'>━</span> training loss (thin: each step, thick: running mean)"
    legend += " &nbsp; <span style='color:var(--b)'>●</span> validation loss</p>" if val else "</p>"
    return chart(series, "nats per token") + legend
