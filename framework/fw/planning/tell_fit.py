"""What a search for a budget has found, in words and columns."""

from __future__ import annotations

from collections.abc import Iterator

from fw.config import format_size
from fw.planning.fit import Candidate, Fit
from fw.planning.techniques import NOTHING


def explanation(fit: Fit) -> str:
    """The chosen ladder with what each rung saves and costs; what was not chosen, and why."""
    combinations = len(fit.planned) + len(fit.estimated)
    lines = [f"budget {format_size(fit.budget)} a rank: {len(fit.planned)} plans for {combinations} combinations", ""]
    lines += _ladder(fit)
    lines += ["", _verdict(fit)]
    if others := list(_others(fit)):
        lines += ["", "not chosen:", *others]
    return "\n".join(lines)


def cost(candidate: Candidate, fit: Fit) -> str:
    """In time, beside the config as it is; empty where that is not known."""
    return f", {_slower(candidate.seconds, fit.base.seconds)}" if fit.base.seconds else ""


def _verdict(fit: Fit) -> str:
    left = fit.budget - fit.best.taken
    if left < 0:
        return f"Nothing fits. {fit.best.label} takes least, {format_size(int(-left))} too much."
    if not fit.best.choices:
        return f"It fits as it is, {format_size(int(left))} left; nothing that may be changed is faster."
    return f"Chosen: {fit.best.label}; {format_size(int(left))} left."


def _ladder(fit: Fit) -> Iterator[str]:
    before: Candidate | None = None
    rows = []
    for rung in fit.ladder:
        added = "" if before is None else " ".join(sorted(set(rung.overrides) - set(before.overrides), key=rung.overrides.index))
        rows.append((f"+ {added}" if added else rung.label, rung, _change(rung, before) if before is not None else ""))
        before = rung
    width = max(len(label) for label, _, _ in rows)
    for label, rung, change in rows:
        fits = "fits" if rung.taken <= fit.budget else "too much"
        yield f"{label:<{width}}  {format_size(int(rung.taken)):>9}  {_time(rung.seconds):>8}  {fits:<8}  {change}".rstrip()


def _change(rung: Candidate, before: Candidate) -> str:
    saved = before.taken - rung.taken
    memory = f"saves {format_size(int(saved))}" if saved >= 0 else f"takes {format_size(int(-saved))} more"
    return f"{memory}, {_slower(rung.seconds, before.seconds)}"


def _slower(seconds: float, before: float) -> str:
    if not before:
        return "time unknown"
    part = seconds / before - 1
    if abs(part) < 0.005:
        return "as fast"
    return f"{abs(part):.0%} {'slower' if part > 0 else 'faster'}"


def _others(fit: Fit) -> Iterator[str]:
    """What was planned by itself and is no part of the best, what is refused, what is kept."""
    base = fit.planned[0]
    chosen = set(fit.best.choices)
    families = {choice.reference or choice for choice in chosen}
    for candidate in fit.planned[1:]:
        if len(candidate.choices) == 1 and not {*candidate.choices} & (chosen | families):
            yield f"  {candidate.label}: alone {format_size(int(candidate.taken))}, {_change(candidate, base)}"
    for choice, why in fit.refused:
        yield f"  {choice.label}: refused: {why}"
    for name, why in fit.kept:
        if why != NOTHING:
            yield f"  {name}: {why}"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds else ""
