"""Line charts as inline SVG: no script, no library, colours from the page's style sheet."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

_WIDTH, _HEIGHT = 900, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 16, 40

Points = list[tuple[float, float]]


def chart(series: Sequence[tuple[str, Points]], label: str, height: int = _HEIGHT, floor: float | None = None) -> str:
    """An SVG element.

    Args:
        series: style class and points of each line; the class ``val`` gets dots with values as tool tips.
        label: what the vertical axis shows.
        floor: the lowest value of that axis, where it shall not follow the data.
    """
    everything = [point for _, points in series for point in points]
    if not everything:
        return "<p class='lead'>Nothing was logged.</p>"
    x_low, x_high = min(x for x, _ in everything), max(x for x, _ in everything)
    y_low, y_high = min(y for _, y in everything), max(y for _, y in everything)
    y_low = floor if floor is not None else y_low
    x_ticks, y_ticks = _ticks(x_low, x_high, 8), _ticks(y_low, y_high, 5 if height > 200 else 3)
    y_low, y_high = min(y_low, y_ticks[0]), max(y_high, y_ticks[-1])

    def x_of(x: float) -> float:
        return _LEFT + (x - x_low) / ((x_high - x_low) or 1) * (_WIDTH - _LEFT - _RIGHT)

    def y_of(y: float) -> float:
        return height - _BOTTOM - (y - y_low) / ((y_high - y_low) or 1) * (height - _TOP - _BOTTOM)

    out = [f"<svg viewBox='0 0 {_WIDTH} {height}' role='img' aria-label='{html.escape(label)} by step'>"]
    for tick in y_ticks:
        out.append(f"<line class='grid' x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{y_of(tick):.1f}' y2='{y_of(tick):.1f}'/>")
        out.append(f"<text x='{_LEFT - 8}' y='{y_of(tick) + 4:.1f}' text-anchor='end'>{tick:g}</text>")
    out += [
        f"<text x='{x_of(t):.1f}' y='{height - _BOTTOM + 18}' text-anchor='middle'>{t:g}</text>" for t in x_ticks if x_low <= t <= x_high
    ]
    out.append(f"<text x='{_WIDTH - _RIGHT}' y='{height - 6}' text-anchor='end'>step</text>")
    out.append(f"<text x='{_LEFT}' y='{_TOP - 4}'>{html.escape(label)}</text>")
    for name, points in series:
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
        out.append(f"<polyline class='{name}' points='{path}'/>")
        if name == "val":
            out += [
                f"<circle class='dot' cx='{x_of(x):.1f}' cy='{y_of(y):.1f}' r='3.5'><title>step {x:g}: {y:.4f}</title></circle>"
                for x, y in points
            ]
    return "".join([*out, "</svg>"])


def points_of(rows: Sequence[Mapping[str, Any]], key: str) -> Points:
    """Of the rows that have a finite number there, step and number."""
    found = [(float(row["step"]), float(row[key])) for row in rows if row.get(key) not in (None, "")]
    return [(x, y) for x, y in found if math.isfinite(y)]


def smooth(points: Points) -> Points:
    """An exponential running mean over about a fiftieth of the run, a plain mean until there are as many points."""
    window = max(1.0, len(points) / 50)
    mean = 0.0
    smoothed = []
    for number, (x, y) in enumerate(points, start=1):
        mean += (y - mean) / min(number, window)
        smoothed.append((x, mean))
    return smoothed


def thin(points: Points, most: int = 1500) -> Points:
    """About so many of them, the last one included."""
    stride = max(1, len(points) // most)
    return points[::stride] + ([points[-1]] if points and (len(points) - 1) % stride else [])


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers from at or below ``low`` to at or above ``high``."""
    span = (high - low) or abs(high) or 1.0
    unit = 10 ** math.floor(math.log10(span / most))
    step = next(unit * m for m in (1, 2, 5, 10) if span / (unit * m) <= most)
    first = math.floor(low / step)
    return [round(step * n, 12) for n in range(first, math.ceil(high / step - 1e-9) + 1)]
