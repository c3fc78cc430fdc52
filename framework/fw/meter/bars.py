"""Memory as stacked bars: SVG for a page or by itself, no script, no library; light and dark."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from fw.config import format_size

_COLOURS = (
    *("#2364aa", "#5b9bd5", "#9cc3e6", "#d1495b", "#e8913a", "#2a9d8f"),
    *("#8a6fb0", "#c2509a", "#b9a48c", "#6b8f3c", "#d9c14a", "#9aa5b1"),
)
_WIDTH, _LEFT, _RIGHT, _TOP = 900, 250, 96, 16
_BAR, _GAP, _LEGEND = 20, 12, 22
_STYLE = """.bars text { font: 13px system-ui, sans-serif; fill: #1c2733; } .bars .soft { fill: #66788a; } .bars .grid { stroke: #dfe5ea; }
@media (prefers-color-scheme: dark) { .bars text { fill: #e6edf3; } .bars .soft { fill: #93a3b3; } .bars .grid { stroke: #2f3b47; } }"""


def bars(rows: Sequence[tuple[str, Mapping[str, int]]], categories: Sequence[str], title: str) -> str:
    """An SVG document.

    Args:
        rows: label and bytes by category of each bar, from the top.
        categories: in the order in which they are stacked; those without bytes are left out.
        title: for those who do not see the picture.
    """
    shown = [c for c in categories if any(parts.get(c) for _, parts in rows)]
    palette = colours(categories)
    most = max((sum(parts.values()) for _, parts in rows), default=0) or 1
    scale = (_WIDTH - _LEFT - _RIGHT) / most
    bottom = _TOP + len(rows) * (_BAR + _GAP)
    lines = -(-len(shown) // 4)
    height = bottom + 28 + lines * _LEGEND
    out = [
        f"<svg xmlns='http://www.w3.org/2000/svg' class='bars' viewBox='0 0 {_WIDTH} {height}' role='img'>",
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>",
    ]
    for tick in ticks(most):
        x = _LEFT + tick * scale
        out.append(f"<line class='grid' x1='{x:.1f}' x2='{x:.1f}' y1='{_TOP - 6}' y2='{bottom}'/>")
        out.append(f"<text class='soft' x='{x:.1f}' y='{bottom + 14}' text-anchor='middle'>{format_size(tick) if tick else 0}</text>")
    for number, (label, parts) in enumerate(rows):
        y, x = _TOP + number * (_BAR + _GAP), float(_LEFT)
        out.append(f"<text x='{_LEFT - 10}' y='{y + 15}' text-anchor='end'>{html.escape(label)}</text>")
        for category in shown:
            if nbytes := parts.get(category, 0):
                tip = f"<title>{category}: {format_size(nbytes)}</title>"
                size = f"width='{nbytes * scale:.1f}' height='{_BAR}'"
                out.append(f"<rect x='{x:.1f}' y='{y}' {size} fill='{palette[category]}'>{tip}</rect>")
                x += nbytes * scale
        out.append(f"<text class='soft' x='{x + 8:.1f}' y='{y + 15}'>{format_size(sum(parts.values()))}</text>")
    for number, category in enumerate(shown):
        x, y = 24 + number % 4 * 215, bottom + 28 + number // 4 * _LEGEND
        out.append(f"<rect x='{x}' y='{y}' width='12' height='12' fill='{palette[category]}'/>")
        out.append(f"<text x='{x + 18}' y='{y + 11}'>{html.escape(category)}</text>")
    return "\n".join([*out, "</svg>"]) + "\n"


def colours(categories: Sequence[str]) -> dict[str, str]:
    """Of each category, ``#rrggbb``."""
    return {category: _COLOURS[number % len(_COLOURS)] for number, category in enumerate(categories)}


def ticks(most: int) -> list[int]:
    """Round numbers of bytes from 0 to at most ``most``, four to eight of them."""
    unit = 1
    while unit * 8 <= most:
        unit *= 2
    return list(range(0, most + 1, unit))
