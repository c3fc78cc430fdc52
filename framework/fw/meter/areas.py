"""Memory over one step as stacked areas."""

from __future__ import annotations

from collections.abc import Callable

from fw.config import format_size
from fw.meter.account import UNNAMED
from fw.meter.bars import colours, ticks
from fw.meter.detail import Timeline
from fw.meter.drawing import Area, Drawing, Line, Words
from fw.meter.step_memory import (
    ACTIVATIONS,
    BUFFERS,
    CATEGORIES,
    COPIES,
    EXCHANGED,
    GATHERED,
    GRADIENTS,
    HEAD,
    INPUTS,
    OPTIMIZER,
    OTHER,
    WEIGHTS,
)

STACK = (WEIGHTS, OPTIMIZER, BUFFERS, INPUTS, OTHER, GRADIENTS, ACTIVATIONS, HEAD, COPIES, GATHERED, EXCHANGED, UNNAMED)
"""What stays is below what comes and goes."""

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1080, 460, 84, 800, 56, 418
"""Of the picture, and of its frame."""
_LEGEND = 828
_ROW = 27
_FAR = 1.6
"""A budget that is so many times the peak is said, not drawn: nothing else could be seen."""
_LETTER = 7.0
"""Width of one, in the middle."""


def areas(timeline: Timeline, title: str, budget: int | None = None, headed: bool = True) -> Drawing:
    """The picture.

    Args:
        title: what it shows.
        budget: bytes that a rank may take.
        headed: whether the title stands above it.
    """
    total, peak_at = timeline.total, timeline.peak
    peak, last = total[peak_at], max(timeline.moved[-1], 1)
    near = budget is not None and budget <= _FAR * peak
    top = max(peak * 1.12, budget * 1.06 if budget is not None and near else 0, 1)

    def x_of(moved: float) -> float:
        return LEFT + moved / last * (RIGHT - LEFT)

    def y_of(nbytes: float) -> float:
        return BOTTOM - nbytes / top * (BOTTOM - TOP)

    out = Drawing(WIDTH, HEIGHT, title)
    _phases(out, timeline, x_of)
    for tick in ticks(int(top)):
        out.shapes.append(Line((LEFT, y_of(tick)), (RIGHT, y_of(tick))))
        out.shapes.append(Words(LEFT - 10, y_of(tick) + 4, format_size(tick) if tick else "0", "end", "soft"))
    shown = [category for category in STACK if any(timeline.by_category.get(category, ()))]
    palette = colours(list(CATEGORIES))
    below = [0] * len(total)
    for category in shown:
        above = [a + b for a, b in zip(below, timeline.by_category[category], strict=True)]
        edge = [(x_of(x), y_of(y)) for x, y in zip(timeline.moved, above, strict=True)]
        base = [(x_of(x), y_of(y)) for x, y in zip(timeline.moved, below, strict=True)]
        out.shapes.append(Area([*edge, *reversed(base)], palette[category]))
        below = above
    out.shapes.append(
        Words((LEFT + RIGHT) / 2, BOTTOM + 24, f"allocated and freed since the step began (in all {format_size(last)})", "middle", "soft")
    )
    x, y = x_of(timeline.moved[peak_at]), y_of(peak)
    if budget is not None and near:
        out.shapes.append(Line((LEFT, y_of(budget)), (RIGHT, y_of(budget)), "paper", 4))  # red would not be seen on every area
        out.shapes.append(Line((LEFT, y_of(budget)), (RIGHT, y_of(budget)), "limit", 2, dashed=True))
        left = x > (LEFT + RIGHT) / 2
        words = f"budget {format_size(budget)}"
        room = len(words) * _LETTER + 24
        begin = LEFT + 8 if left else RIGHT - 8 - room
        if budget < peak:
            out.rectangle(begin, y_of(budget) - 24, room, 20, "paper")
        out.shapes.append(Words(begin + room / 2, y_of(budget) - 9, words, "middle", "limit", bold=True))
    out.shapes.append(Line((LEFT, y), (RIGHT, y), "ink", 1, dashed=True))
    anchor, aside = ("end", -8) if x > (LEFT + RIGHT) / 2 else ("start", 8)
    out.shapes.append(Area([(x - 5, y - 9), (x + 5, y - 9), (x, y - 1)], "ink"))
    label = y - 7 if not (budget is not None and near and abs(y_of(budget) - (y - 11)) < 16) else y + 14
    out.shapes.append(Words(x + aside, label, f"peak {format_size(peak)}", anchor, "ink", 15, bold=True))
    _legend(out, timeline, shown, palette)
    if headed:
        out.shapes.append(Words(LEFT, 22, f"{title}{_far(budget, peak)}", "start", "ink", 15, bold=True))
    return out


def _far(budget: int | None, peak: int) -> str:
    """What is said of a budget that is not drawn."""
    return "" if budget is None or budget <= _FAR * peak else f" · budget {format_size(budget)}, {budget / peak:.3g} times the peak"


def _phases(out: Drawing, timeline: Timeline, x_of: Callable[[float], float]) -> None:
    ends = [*(moved for moved, _ in timeline.phases[1:]), timeline.moved[-1]]
    stretches = [(x_of(begin), x_of(end), name) for (begin, name), end in zip(timeline.phases, ends, strict=False)]
    for number, (x1, x2, name) in enumerate(stretch for stretch in stretches if stretch[1] - stretch[0] > 1):
        if number % 2 == 0:
            out.rectangle(x1, TOP - 20, x2 - x1, BOTTOM - TOP + 20, "shade")
        if x2 - x1 > len(name) * _LETTER + 2:
            out.shapes.append(Words((x1 + x2) / 2, TOP - 6, name, "middle", "soft", 13, bold=True))
        elif x2 >= RIGHT:
            out.shapes.append(Words(RIGHT + 4, TOP - 6, name, "start", "soft", 13, bold=True))
    out.shapes.append(Line((LEFT, TOP - 20), (LEFT, BOTTOM)))


def _legend(out: Drawing, timeline: Timeline, shown: list[str], palette: dict[str, str]) -> None:
    """In the order of the stack from above, with what each is at the peak."""
    out.shapes.append(Words(WIDTH - 14, TOP - 6, "at the peak", "end", "soft"))
    for row, category in enumerate(reversed(shown)):
        y = TOP + 8 + row * _ROW
        out.rectangle(_LEGEND, y, 14, 14, palette[category])
        out.shapes.append(Words(_LEGEND + 23, y + 12, category, size=14))
        out.shapes.append(Words(WIDTH - 14, y + 12, format_size(timeline.by_category[category][timeline.peak]), "end", size=14))
    y = TOP + 8 + len(shown) * _ROW
    out.shapes.append(Line((_LEGEND, y - 3), (WIDTH - 14, y - 3)))
    out.shapes.append(Words(_LEGEND + 23, y + 16, "all", size=14, bold=True))
    out.shapes.append(Words(WIDTH - 14, y + 16, format_size(timeline.total[timeline.peak]), "end", size=14, bold=True))
