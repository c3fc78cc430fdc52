"""Where a step's time went, as a part of a page."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from fw.config import format_size
from fw.meter.bars import colours
from fw.meter.binding import RESOURCES
from fw.meter.operators import Operator
from fw.meter.step_clock import PHASES
from fw.meter.step_time import StepTime
from fw.planning.markup import table
from fw.planning.tell_time import by_name, copies, sentence, took, transfers

STYLE = """
.shares { display: flex; height: 1.5rem; border-radius: 6px; overflow: hidden; margin: .6rem 0 .4rem; }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; font-size: .9rem; margin-bottom: 1.4rem; }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .5em; }
""".strip()

_SHOWN = 12


def section(time: StepTime) -> str:
    """Phases, what binds, the operators."""
    parts = ["<h2>Where the time goes</h2>"]
    if time.phases:
        told = f"{time.tokens_per_second:,.0f} tokens/s, MFU {time.mfu:.1%}"
        told += "".join(f"; {joules:.3g} J a token ({html.escape(name)})" for name, joules in time.joules_per_token.items())
        parts.append(f"<p class='soft'>{told}. A step of rank 0 by phase, mean of those that were timed:</p>{_bar(time.phases[0], PHASES)}")
    if time.levels:
        names = list(next(iter(time.levels.values())))
        rows = [[phase, *(format_size(held[name]) for name in names)] for phase, held in time.levels.items()]
        parts.append(f"<h2>Held when a phase ends</h2>{table(['', *names], rows)}")
    if time.bound is not None:
        said = html.escape(sentence(time.bound))
        parts.append(f"<p class='soft'>By what bounds it, operator by operator, in a step that was traced: {said}.</p>")
        parts.append(_bar(time.bound.shares, RESOURCES))
    if time.trace is not None:
        seconds, operators = time.trace.seconds, by_name(time.trace.operators)
        most = [each for each in sorted(operators, key=lambda each: -each.allocated_bytes) if each.allocated_bytes]
        parts.append(f"<div class='columns'><div><h2>Operators by time</h2>{_operators(operators[:_SHOWN], seconds)}</div>")
        parts.append(f"<div><h2>Operators by memory</h2>{_operators(most[:_SHOWN], seconds)}</div></div>")
        if time.trace.copied:
            heads = ["", "way", "times", "bytes"]
            parts.append(f"<h2>Copies between host and GPU in the step</h2>{table(heads, copies(time.trace))}")
        if time.trace.transfers:
            rows = [[way, nbytes, rate + most] for way, nbytes, rate, most in transfers(time.trace)]
            parts.append(f"<h2>Transfers in the step</h2>{table(['', 'bytes', 'rate'], rows)}")
    return "\n".join(parts)


def _bar(values: Mapping[str, float], known: Mapping[str, str]) -> str:
    """Shares of a whole as parts of a bar, with a key."""
    total, palette = sum(values.values()) or 1.0, colours(list(known))
    shown = [(name, values[name] / total) for name in known if values.get(name, 0.0) >= 0.005 * total]
    spans = "".join(f"<span style='width:{share:.2%};background:{palette[name]}' title='{known[name]}'></span>" for name, share in shown)
    keys = "".join(
        f"<span title='{known[name]}'><i style='background:{palette[name]}'></i>{name} {share:.0%}</span>" for name, share in shown
    )
    return f"<div class='shares'>{spans}</div><div class='key'>{keys}</div>"


def _operators(operators: Sequence[Operator], seconds: float) -> str:
    rows = [
        [
            each.name.removeprefix("aten::"),
            f"{each.calls}",
            took(each.seconds),
            f"{each.seconds / seconds:.1%}",
            format_size(each.allocated_bytes),
        ]
        for each in operators
    ]
    return table(["", "calls", "time", "of the step", "allocated"], rows)
