"""A memory document as a page: self-contained, light and dark."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence

from fw.config import format_size
from fw.meter.areas import BOTTOM, LEFT, RIGHT, STACK, TOP, WIDTH, areas
from fw.meter.bars import bars, colours
from fw.meter.detail import Detail
from fw.meter.document import COMPONENTS, MemoryDocument, RankMemory
from fw.meter.drawing import Drawing
from fw.meter.findings import GROWING, KEPT, TWICE
from fw.meter.step_memory import CATEGORIES
from fw.planning.fit import Fit
from fw.planning.markup import table
from fw.planning.page_time import STYLE, section
from fw.planning.pareto import pareto
from fw.planning.tell import allocated, verdict
from fw.planning.tell_fit import explanation

FORMULA = {
    "model": ("parameters", "buffers"),
    "activations": ("activations",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "buffer": ("temporary", "communication", "inputs", "kv", "other"),
}
"""The usual estimate, total = model + activations + gradients + optimizer + buffer, by components of the document."""

_ALIKE = 12
"""Modules that are shown one by one; of more, those alike next to each other share a bar."""

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2733; --soft: #5d6f81; --line: #dfe5ea; --paper: #fff; --card: #f4f6f8; --good: #1b7f5c;
  --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #93a3b3; --line: #2f3b47; --paper: #12181f; --card: #1a222b; --good: #5fd3a8; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1120px; margin: 2.2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.8rem; margin: 0; } h2 { font-size: 1.2rem; margin: 2.6rem 0 .6rem; } p { margin: .3rem 0 .8rem; }
.soft { color: var(--soft); } .good { color: var(--good); } .bad { color: var(--bad); }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.4rem 0; }
.card { background: var(--card); border-radius: 10px; padding: .8rem 1.1rem; flex: 1 1 9rem; }
.card b { display: block; font-size: 1.45rem; line-height: 1.3; white-space: nowrap; }
.card > span { color: var(--soft); font-size: .85rem; }
.columns { display: flex; flex-wrap: wrap; gap: 0 3rem; align-items: flex-start; } .columns > div { flex: 1 1 24rem; min-width: 0; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .95rem; }
th, td { text-align: right; padding: .34rem .5rem; border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums;
  white-space: nowrap; }
thead th { color: var(--soft); font-weight: 500; } th:first-child, td:first-child { text-align: left; padding-left: 0; }
tbody th { font-weight: 500; } tr.all > * { font-weight: 600; border-bottom: 0; }
svg { width: 100%; height: auto; display: block; } .drawing { position: relative; }
#tip { position: absolute; display: none; pointer-events: none; background: var(--paper); border: 1px solid var(--line); border-radius: 8px;
  padding: .5rem .7rem; font-size: .85rem; box-shadow: 0 4px 16px #0003; white-space: nowrap; z-index: 1; }
#tip i { display: inline-block; width: .7em; height: .7em; margin-right: .5em; } #tip td { border: 0; padding: 0 0 0 1rem; }
#tip td:first-child { padding: 0; } #hair { position: absolute; display: none; width: 1px; background: var(--ink); pointer-events: none; }
""".strip()

_SCRIPT = """
(() => {
  const box = document.querySelector('.drawing'), data = JSON.parse(document.getElementById('timeline').textContent);
  const tip = document.getElementById('tip'), hair = document.getElementById('hair'), last = data.moved[data.moved.length - 1] || 1;
  const size = n => { for (const unit of ['B', 'KiB', 'MiB', 'GiB', 'TiB']) { if (n < 1000 || unit == 'TiB')
    return (unit == 'B' ? n : Number(n.toPrecision(3))) + ' ' + unit; n /= 1024; } };
  box.addEventListener('mousemove', event => {
    const shown = box.getBoundingClientRect(), scale = shown.width / data.width, x = (event.clientX - shown.left) / scale;
    if (x < data.left || x > data.right) { tip.style.display = hair.style.display = 'none'; return; }
    const at = (x - data.left) / (data.right - data.left) * last;
    let point = data.moved.findIndex(moved => moved >= at); if (point < 0) point = data.moved.length - 1;
    const phase = data.phases.filter(([moved]) => moved <= data.moved[point]).pop();
    const parts = data.stack.map(([name, colour]) => [name, colour, data.by_category[name][point]]);
    const all = parts.reduce((sum, part) => sum + part[2], 0);
    const rows = parts.filter(part => part[2]).reverse().map(([name, colour, bytes]) =>
      `<tr><td><i style="background:${colour}"></i>${name}</td><td>${size(bytes)}</td></tr>`);
    tip.innerHTML = `<b>${size(all)}</b> in ${phase ? phase[1] : ''}<table>${rows.join('')}</table>`;
    hair.style.display = tip.style.display = 'block';
    const where = (data.left + data.moved[point] / last * (data.right - data.left)) * scale;
    Object.assign(hair.style, { left: where + 'px', top: data.top * scale + 'px', height: (data.bottom - data.top) * scale + 'px' });
    const side = where > shown.width / 2 ? where - tip.offsetWidth - 14 : where + 14;
    Object.assign(tip.style, { left: side + 'px', top: (data.top + 40) * scale + 'px' });
  });
  box.addEventListener('mouseleave', () => { tip.style.display = hair.style.display = 'none'; });
})();
""".strip()


def picture(document: MemoryDocument, how: str, headed: bool = True) -> Drawing:
    """Memory over one step of the rank that takes most; ``how``: planned or measured; ``headed``: says so above."""
    assert document.detail is not None, "a document without detail has no picture"
    ranks = f", rank {document.detail.rank} of {document.world_size}" if document.world_size > 1 else ""
    return areas(document.detail.timeline, f"Memory over one step of {document.config}, {how}{ranks}", document.budget, headed)


def page(document: MemoryDocument, how: str, fit: Fit | None = None) -> str:
    """The page; ``how``: planned or measured; ``fit``: the search that chose it."""
    detail = document.detail
    assert detail is not None, "a document without detail has no page"
    title = f"Memory of {document.config}, {how}"
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{html.escape(title)}</title><style>{_STYLE}\n{STYLE}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        f"<p class='soft'>{_subtitle(document, detail)}</p>",
        _cards(document, detail),
        "<h2>Over one step</h2>",
        f"<div class='drawing'>{picture(document, how, headed=False).svg('areas')}<div id='hair'></div><div id='tip'></div></div>",
        "<h2>By module</h2><p class='soft'>What each keeps: weights, gradients, optimizer state, and activations for backward.</p>",
        bars(_rows(detail), list(CATEGORIES), "bytes that each module keeps"),
        f"<div class='columns'><div><h2>By component</h2>{_components(document.largest, detail)}</div>",
        f"<div><h2>As an estimate</h2>{_formula(document.largest, detail)}</div></div>",
        "<h2>By phase</h2><p class='soft'>At the highest moment of each; files are those that the rank reads or writes.</p>",
        _phases(document.largest),
        *([] if fit is None else [_searched(fit, document)]),
        *([f"<h2>By rank</h2>{_ranks(document)}"] if document.world_size > 1 else []),
        *([] if document.time is None else [section(document.time)]),
        *([] if how == "planned" else [f"<h2>Findings</h2>{_findings(document, detail)}"]),
        f"<script type='application/json' id='timeline'>{_data(detail)}</script><script>{_SCRIPT}</script></body></html>",
    ]
    return "\n".join(parts) + "\n"


def _searched(fit: Fit, document: MemoryDocument) -> str:
    drawing = pareto(fit, f"Memory and time of {document.config}, planned", headed=False)
    words = html.escape(explanation(fit))
    return f"<h2>What was searched</h2>{drawing.svg('pareto')}<div class='wide'><pre>{words}</pre></div>"


def _subtitle(document: MemoryDocument, detail: Detail) -> str:
    ranks = f"{document.world_size} rank{'s' * (document.world_size > 1)} on {html.escape(document.device)}"
    which = f" Pictures and tables are of rank {detail.rank}, which takes most." if document.world_size > 1 else ""
    return f"{ranks}, {detail.parameters:,} parameters.{which}"


def _cards(document: MemoryDocument, detail: Detail) -> str:
    rank = document.largest
    cards = [(allocated(rank), f"allocated at the peak, in {rank.peak_phase}")]
    if rank.driver_peak:
        cards += [(format_size(rank.reserved_peak), "reserved"), (format_size(rank.driver_peak), "given out by the driver")]
    if document.budget is not None:
        mood = "good" if document.fits else "bad"
        cards.append((f"<span class='{mood}'>{verdict(document)}</span>", f"budget {format_size(document.budget)}"))
    if detail.parameters:
        cards.append((f"{rank.allocated_peak / detail.parameters:.3g}", "bytes per parameter at the peak"))
    cards.append((format_size(rank.host_peak), "host memory of the process"))
    if document.step_time is not None:
        cards.append((f"{document.step_time:.3g} s", "a step"))
    shown = "".join(f"<div class='card'><b>{value}</b><span>{label}</span></div>" for value, label in cards)
    return f"<div class='cards'>{shown}</div>"


def _rows(detail: Detail) -> list[tuple[str, Mapping[str, int]]]:
    """Of the modules that keep anything."""
    rows = [(name, kept) for name, kept in detail.modules.items() if any(kept.values())]
    if len(rows) <= _ALIKE:
        return rows
    merged: list[tuple[str, Mapping[str, int]]] = []
    group: list[tuple[str, Mapping[str, int]]] = []
    for row in [*rows, None]:
        if group and (row is None or _as_shown(row[1]) != _as_shown(group[0][1])):
            first, last = group[0][0], group[-1][0]
            merged.append((first if len(group) == 1 else f"{first} to {last}, each", group[0][1]))
            group = []
        if row is not None:
            group.append(row)
    return merged


def _as_shown(kept: Mapping[str, int]) -> list[str]:
    return [format_size(nbytes) for nbytes in kept.values()]


def _components(rank: RankMemory, detail: Detail) -> str:
    shown = [name for name in COMPONENTS if rank.most.get(name, 0) or rank.at_peak.get(name, 0)]
    rows = [
        [
            name,
            format_size(rank.at_peak.get(name, 0)),
            format_size(rank.most.get(name, 0)),
            _per_parameter(rank.most.get(name, 0), detail),
        ]
        for name in shown
    ]
    rows.append(["allocated", format_size(rank.allocated_peak), "", _per_parameter(rank.allocated_peak, detail)])
    return table(["", "at the peak", "at most", "bytes per parameter"], rows, last_is_all=True)


def _formula(rank: RankMemory, detail: Detail) -> str:
    rows = []
    for name, components in FORMULA.items():
        at_peak, most = (sum(sizes.get(component, 0) for component in components) for sizes in (rank.at_peak, rank.most))
        rows.append([name, format_size(at_peak), _per_parameter(at_peak, detail), _per_parameter(most, detail)])
    rows.append(["total", format_size(rank.allocated_peak), _per_parameter(rank.allocated_peak, detail), ""])
    words = "total = model + activations + gradients + optimizer + buffer; what this rank takes, by the parameters of the whole model."
    return f"{table(['', 'at the peak', 'bytes per parameter', 'at most'], rows, last_is_all=True)}<p class='soft'>{words}</p>"


def _phases(rank: RankMemory) -> str:
    shown = [name for name in COMPONENTS if any(phase.parts.get(name, 0) for phase in rank.phases.values())]
    besides = [name for name in ("host", "disk") if any(getattr(phase, name) for phase in rank.phases.values())]
    rows = [
        [name, *(format_size(nbytes) if nbytes else "" for nbytes in sizes)]
        for name, phase in rank.phases.items()
        for sizes in [[phase.allocated_peak, *(phase.parts.get(part, 0) for part in shown), *(getattr(phase, each) for each in besides)]]
    ]
    return table(["", "allocated", *shown, *({"host": "host besides", "disk": "files"}[name] for name in besides)], rows)


def _per_parameter(nbytes: int, detail: Detail) -> str:
    return f"{nbytes / detail.parameters:.2f}" if detail.parameters else ""


def _ranks(document: MemoryDocument) -> str:
    groups: dict[tuple[object, ...], list[RankMemory]] = {}
    for rank in document.per_rank:
        key = (allocated(rank), rank.peak_phase, *(format_size(rank.at_peak.get(name, 0)) for name in COMPONENTS))
        groups.setdefault(key, []).append(rank)
    if len(groups) == 1:
        return "<p>Every rank takes as much as every other.</p>"
    shown = [name for name in COMPONENTS if any(rank.at_peak.get(name, 0) for rank in document.per_rank)]
    rows = [
        [_numbers([rank.rank for rank in ranks]), allocated(ranks[0]), ranks[0].peak_phase]
        + [format_size(ranks[0].at_peak.get(name, 0)) for name in shown]
        for ranks in groups.values()
    ]
    return table(["rank", "allocated", "peak in", *shown], rows)


def _numbers(ranks: Sequence[int]) -> str:
    """``0 to 3, 6``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def _findings(document: MemoryDocument, detail: Detail) -> str:
    if not detail.findings:
        return "<p>No tensor outlasts its step but those that should; no parameters or buffers are equal without being shared.</p>"
    words = {GROWING: "Leak", KEPT: "Kept", TWICE: "Twice"}
    items = [f"<li><b>{words[each.kind]}</b>: {html.escape(each.sentence(document.world_size))}</li>" for each in detail.findings]
    return f"<ul>{''.join(items)}</ul>"


def _data(detail: Detail) -> str:
    palette = colours(list(CATEGORIES))
    stack = [(category, palette[category]) for category in STACK if category in detail.timeline.by_category]
    frame = {"width": WIDTH, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM, "stack": stack}
    return json.dumps({**detail.timeline.as_json(), **frame}, separators=(",", ":")).replace("</", "<\\/")
