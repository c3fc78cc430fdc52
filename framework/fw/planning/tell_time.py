"""Where a step's time went, in words and columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fw.config import format_size
from fw.meter.binding import Bound
from fw.meter.operators import Operator, StepTrace
from fw.meter.step_clock import shares
from fw.meter.step_time import StepTime

_SHOWN = 8
_SHORT = 54


def lines(time: StepTime) -> list[str]:
    """Below a profile's table."""
    told = []
    if time.phases:
        told = [f"{time.tokens_per_second:,.0f} tokens/s, MFU {time.mfu:.1%}", f"time of a step: {shares(time.phases[0])}"]
    told += [f"held at the end of {phase}: {held(names)}" for phase, names in time.levels.items()]
    told += [f"energy: {joules:.3g} J a token ({name})" for name, joules in time.joules_per_token.items()]
    told += [sentence(time.bound)] if time.bound is not None else []
    if time.trace is None:
        return told
    told += _table("operators that take longest", by_name(time.trace.operators)[:_SHOWN], time.trace.seconds)
    most = sorted(by_name(time.trace.operators), key=lambda each: -each.allocated_bytes)[:_SHOWN]
    told += _table("operators that allocate most", [each for each in most if each.allocated_bytes > 0], time.trace.seconds)
    if time.trace.copied:
        told += ["", "copies between host and GPU in the step"]
        told += [f"  {operator}: {nbytes} {way} in {times} copies" for operator, way, times, nbytes in copies(time.trace)]
    if time.trace.transfers:
        told += ["", "transfers"]
        told += [f"  {way}: {nbytes} at {rate}{most}" for way, nbytes, rate, most in transfers(time.trace)]
    return told


def sentence(bound: Bound) -> str:
    """``compute binds: 71 % of a step, at 310 of 420 GFLOP/s; memory bandwidth 14 %, …``."""
    first = bound.binding
    at = ""
    if first == "compute" and bound.peak_flops:
        at = f", at {_rate(bound.flops_per_second, 'FLOP/s')} of {_rate(bound.peak_flops, 'FLOP/s')}"
    elif first == "memory bandwidth":
        at = f", reading {_rate(bound.bytes_per_second, 'B/s')} of {_rate(bound.peak_bandwidth, 'B/s')} that can be moved"
    rest = sorted((item for item in bound.shares.items() if item[0] != first and item[1] >= 0.005), key=lambda item: -item[1])
    others = "".join(f"{', ' if place else '; '}{name} {share:.0%}" for place, (name, share) in enumerate(rest))
    return f"{first} {'bind' if first.endswith('s') and first != 'copies' else 'binds'}: {bound.shares[first]:.0%} of a step{at}{others}"


def by_name(operators: Sequence[Operator]) -> list[Operator]:
    """One of each name, whatever its shapes; those that take longest first."""
    groups: dict[str, list[Operator]] = {}
    for operator in operators:
        groups.setdefault(operator.name, []).append(operator)
    merged = [
        Operator(
            name,
            "",
            sum(each.calls for each in group),
            sum(each.seconds for each in group),
            sum(each.calls * each.flops for each in group),
            group[0].dtype,
            0,
            sum(each.allocated_bytes for each in group),
            group[0].kind,
        )
        for name, group in groups.items()
    ]
    return sorted(merged, key=lambda each: -each.seconds)


def _table(title: str, operators: Sequence[Operator], seconds: float) -> list[str]:
    out = ["", f"{title:<{_SHORT}}{'calls':>7}{'time':>10}{'':>7}{'allocated':>12}"]
    for each in operators:
        name = each.name.removeprefix("aten::")
        name = name if len(name) < _SHORT else f"{name[: _SHORT - 2]}…"
        out.append(
            f"{name:<{_SHORT}}{each.calls:>7}{took(each.seconds):>10}{each.seconds / seconds:>7.1%}{format_size(each.allocated_bytes):>12}"
        )
    return out


def held(names: Mapping[str, int]) -> str:
    """``host 1.2 GiB, reserved 20 GiB``."""
    return ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in names.items())


def copies(trace: StepTrace) -> list[list[str]]:
    """For each operator that copies between host and GPU its name, the way, how often, and how much; the most first."""
    return [
        [each.operator or "another thread", "to the host" if each.to_host else "to the GPU", f"{each.times}", format_size(each.nbytes)]
        for each in sorted(trace.copied, key=lambda each: -each.nbytes)
    ]


def transfers(trace: StepTrace) -> list[list[str]]:
    """For each way that offload's bytes go its name, how many, how fast, and the most that was measured."""
    return [
        [each.way, format_size(each.nbytes), _rate(each.rate, "B/s"), f" of {_rate(each.most, 'B/s')} measured" if each.most else ""]
        for each in trace.transfers
    ]


def took(seconds: float) -> str:
    """In s, or ms where it is less."""
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{seconds * 1e3:.3g} ms"


def _rate(value: float, unit: str) -> str:
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
