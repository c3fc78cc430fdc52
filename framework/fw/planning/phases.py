"""What each phase of a run takes, before, between and after steps."""

from __future__ import annotations

from dataclasses import replace

from fw.meter.document import PHASES, PhaseMemory, RankMemory
from fw.planning.trace import RankTrace


def with_phases(rank: RankMemory, trace: RankTrace) -> RankMemory:
    """A planned rank with those around its steps.

    Copies of what is being written are there from the first checkpoint on: they are in the host's memory in every phase that follows.
    """
    found = {"load": PhaseMemory(trace.load, 0, trace.read_bytes), **rank.phases}
    if trace.validate is not None:
        found["validate"] = PhaseMemory(trace.validate)
    host_peak = rank.host_peak
    if trace.save is not None:
        parts, saved = trace.save
        writes, copies = saved.writes[rank.rank], saved.copies[rank.rank]
        found["save"] = PhaseMemory(parts, copies + writes.host, writes.disk)
        if trace.resume is not None:
            found["resume"] = PhaseMemory(trace.resume, 0, saved.pieces)
        host_peak += copies + writes.host
    return replace(rank, host_peak=host_peak, phases={name: found[name] for name in PHASES if name in found})
