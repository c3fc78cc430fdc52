"""Errors against peaks as a picture: SVG, no script, no library; light and dark."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from fw.config import format_size

_COLOURS = ("#3b86d1", "#e8913a", "#2a9d8f")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 900, 420, 70, 40, 16, 76
_STYLE = """.dots text { font: 13px system-ui, sans-serif; fill: #1c2733; } .dots .soft { fill: #66788a; } .dots .grid { stroke: #dfe5ea; }
.dots .zero { stroke: #66788a; }
@media (prefers-color-scheme: dark) { .dots text { fill: #e6edf3; } .dots .soft { fill: #93a3b3; } .dots .grid { stroke: #2f3b47; }
.dots .zero { stroke: #93a3b3; } }"""

_LEAST = 1.0
"""Percent that the picture shows at least, up or down: what is nothing is to look like nothing."""

Dot = tuple[str, int, float]
"""Label, measured peak in bytes, error as a part of it."""


def scatter(groups: Mapping[str, Sequence[Dot]], title: str) -> str:
    """An SVG document: error in percent above the logarithm of the peak.

    Args:
        groups: dots by what they are called, a colour each.
        title: for those who do not see the picture.

    Raises:
        ValueError: there is no dot.
    """
    dots = [dot for group in groups.values() for dot in group]
    if not dots:
        raise ValueError("nothing to draw")
    low, high = (math.floor(math.log2(min(d[1] for d in dots))), math.ceil(math.log2(max(d[1] for d in dots)) + 1e-9))
    high = max(high, low + 1)
    step = _step(max(_LEAST, *(abs(error) * 100 for _, _, error in dots)))
    top = step * math.ceil(max(_LEAST, *(error * 100 for _, _, error in dots)) / step)
    bottom = -step * math.ceil(max(_LEAST, *(-error * 100 for _, _, error in dots)) / step)

    def x_of(nbytes: float) -> float:
        return _LEFT + (math.log2(nbytes) - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def y_of(percent: float) -> float:
        return _TOP + (top - percent) / (top - bottom) * (_HEIGHT - _TOP - _BOTTOM)

    out = [
        f"<svg xmlns='http://www.w3.org/2000/svg' class='dots' viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img'>",
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>",
    ]
    for number in range(round((top - bottom) / step) + 1):
        percent = bottom + number * step
        y, name = y_of(percent), "zero" if abs(percent) < step / 2 else "grid"
        out.append(f"<line class='{name}' x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{y:.1f}' y2='{y:.1f}'/>")
        shown = "0" if name == "zero" else f"{percent:+.6g}"
        out.append(f"<text class='soft' x='{_LEFT - 8}' y='{y + 4:.1f}' text-anchor='end'>{shown} %</text>")
    end = _HEIGHT - _BOTTOM
    for power in range(low, high + 1):
        x = x_of(2.0**power)
        out.append(f"<line class='grid' x1='{x:.1f}' x2='{x:.1f}' y1='{_TOP}' y2='{end}'/>")
        out.append(f"<text class='soft' x='{x:.1f}' y='{end + 18}' text-anchor='middle'>{format_size(2**power)}</text>")
    for group, colour in zip(groups.values(), _COLOURS, strict=False):
        for label, nbytes, error in group:
            tip = f"<title>{html.escape(label)}: {error:+.2%} of {format_size(nbytes)}</title>"
            place = f"cx='{x_of(nbytes):.1f}' cy='{y_of(error * 100):.1f}'"
            out.append(f"<circle {place} r='5' fill='{colour}' fill-opacity='0.8'>{tip}</circle>")
    out.append(
        f"<text x='{_LEFT}' y='{_HEIGHT - 34}'>error of the predicted peak (up: more was predicted) by measured peak of a rank</text>"
    )
    for number, (name, colour) in enumerate(zip(groups, _COLOURS, strict=False)):
        x, y = _LEFT + 6 + number * 215, _HEIGHT - 14
        out.append(f"<circle cx='{x}' cy='{y - 4}' r='5' fill='{colour}'/><text x='{x + 12}' y='{y}'>{html.escape(name)}</text>")
    return "\n".join([*out, "</svg>"]) + "\n"


def _step(most: float) -> float:
    """A round number, so that at most 5 of them are ``most``, which is above 0."""
    unit = 10.0 ** math.floor(math.log10(most))
    return next(unit * n for n in (0.2, 0.5, 1, 2) if most / (unit * n) <= 5)
