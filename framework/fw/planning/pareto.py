"""What was searched for a budget as a picture: predicted memory against predicted time, and what nothing beats in both."""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, floor, log10, pi, sin

from fw.config import format_size
from fw.meter.bars import ticks
from fw.meter.drawing import Area, Drawing, Line, Words
from fw.planning.fit import Candidate, Fit

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1040, 480, 84, 810, 72, 424
_GOOD, _BAD, _GUESS, _BEST = "#1b9e77", "#d95f02", "#9aa7b4", "#7570b3"
_SIDES = 20


def front(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other beats in both memory and time, from little memory to much."""
    found: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.taken, c.seconds)):
        if not found or candidate.seconds < found[-1].seconds:
            found.append(candidate)
    return found


def pareto(fit: Fit, title: str, headed: bool = True) -> Drawing:
    """All candidates: those planned filled, those estimated small. ``headed``: the title stands above."""
    every = [*fit.estimated, *fit.planned]
    most, longest = max(c.taken for c in every), max(c.seconds for c in every)
    right = max(most, fit.budget) * 1.06 if fit.budget <= 2 * most else most * 1.06
    top = longest * 1.08 or 1.0

    def x_of(nbytes: float) -> float:
        return LEFT + nbytes / right * (RIGHT - LEFT)

    def y_of(seconds: float) -> float:
        return BOTTOM - seconds / top * (BOTTOM - TOP)

    out = Drawing(WIDTH, HEIGHT, title)
    for nbytes in ticks(int(right)):
        out.shapes.append(Line((x_of(nbytes), TOP), (x_of(nbytes), BOTTOM)))
        out.shapes.append(Words(x_of(nbytes), BOTTOM + 18, format_size(nbytes) if nbytes else "0", "middle", "soft"))
    for seconds in _round(top):
        out.shapes.append(Line((LEFT, y_of(seconds)), (RIGHT, y_of(seconds))))
        out.shapes.append(Words(LEFT - 8, y_of(seconds) + 4, f"{seconds:.3g} s" if seconds else "0", "end", "soft"))
    out.shapes.append(Words((LEFT + RIGHT) / 2, BOTTOM + 40, "memory of the rank that takes most, predicted", "middle", "soft"))
    out.shapes.append(Words(LEFT - 70, TOP - 14, "time of a step, predicted", "start", "soft"))
    if fit.budget <= right:
        out.shapes.append(Line((x_of(fit.budget), TOP), (x_of(fit.budget), BOTTOM), "limit", 2, dashed=True))
        out.shapes.append(Words(x_of(fit.budget), TOP - 6, f"budget {format_size(fit.budget)}", "middle", "limit", bold=True))
    for candidate in fit.estimated:
        _dot(out, x_of(candidate.taken), y_of(candidate.seconds), 2.2, _GUESS, candidate)
    edge = [(x_of(c.taken), y_of(c.seconds)) for c in front(fit.planned)]
    for (x1, y1), (x2, y2) in zip(edge, edge[1:], strict=False):
        out.shapes += [Line((x1, y1), (x2, y1), "soft", 1.5), Line((x2, y1), (x2, y2), "soft", 1.5)]
    for candidate in fit.planned:
        colour = _GOOD if candidate.taken <= fit.budget else _BAD
        _dot(out, x_of(candidate.taken), y_of(candidate.seconds), 5, colour, candidate)
    _dot(out, x_of(fit.best.taken), y_of(fit.best.seconds), 8, _BEST, fit.best)
    _legend(out, fit)
    if headed:
        out.shapes.append(Words(LEFT - 70, 18, title, "start", "ink", 15, bold=True))
    return out


def _round(most: float) -> list[float]:
    """Round numbers from 0 to at most ``most``, three to six of them."""
    unit = 10.0 ** floor(log10(most))
    step = next(step for step in (unit / 5, unit / 2, unit, 2 * unit) if most / step < 6)
    return [n * step for n in range(int(most / step) + 1)]


def _dot(out: Drawing, x: float, y: float, radius: float, colour: str, candidate: Candidate) -> None:
    points = [(x + radius * cos(2 * pi * n / _SIDES), y + radius * sin(2 * pi * n / _SIDES)) for n in range(_SIDES)]
    out.shapes.append(Area(points, colour, f"{candidate.label}: {format_size(int(candidate.taken))}, {candidate.seconds:.3g} s"))


def _legend(out: Drawing, fit: Fit) -> None:
    rows = [
        (_BEST, "chosen" if fit.fits else "takes least"),
        (_GOOD, "planned, fits"),
        (_BAD, "planned, too much"),
        (_GUESS, "estimated from these"),
    ]
    for row, (colour, text) in enumerate(rows):
        y = TOP + 12 + row * 26
        out.rectangle(RIGHT + 28, y - 10, 12, 12, colour)
        out.shapes.append(Words(RIGHT + 48, y, text, size=14))
    y = TOP + 12 + len(rows) * 26
    out.shapes += [
        Line((RIGHT + 28, y - 4), (RIGHT + 40, y - 4), "soft", 1.5),
        Words(RIGHT + 48, y, "the best of the planned", size=14),
    ]
