"""A memory document in words and columns."""

from __future__ import annotations

from fw.config import format_size
from fw.meter.document import COMPONENTS, Generation, MemoryDocument, RankMemory
from fw.planning import tell_time


def table(document: MemoryDocument, *, planned: bool = False) -> str:
    """The rank that takes most, component by component; how the others differ; whether it fits.

    Args:
        planned: times are estimated, and not measured.
    """
    rank = document.largest
    ranks = f"{document.world_size} rank{'s' * (document.world_size > 1)}"
    lines = [f"{document.config}: {ranks} on {document.device}", ""]
    lines += [f"{_which(document):<16}{'at the peak':>12}{'at most':>12}"]
    for name in COMPONENTS:
        if rank.most.get(name, 0) or rank.at_peak.get(name, 0):
            lines.append(f"{name:<16}{format_size(rank.at_peak.get(name, 0)):>12}{format_size(rank.most.get(name, 0)):>12}")
    lines.append(f"{'allocated':<16}{allocated(rank):>12}  in {rank.peak_phase}")
    if rank.driver_peak:
        unused = rank.reserved_peak - rank.allocated_peak
        lines.append(
            f"{'reserved':<16}{format_size(rank.reserved_peak):>12}  {format_size(unused)} more than tensors take: rounding and gaps"
        )
        lines.append(f"{'driver':<16}{format_size(rank.driver_peak):>12}  with context, kernels{' and NCCL' * (document.world_size > 1)}")
    lines.append(f"{'host':<16}{format_size(rank.host_peak):>12}")
    if planned:
        lines += ["", *phases(document), ""]
    if document.step_time is not None:
        speeds = "as fast as this machine was measured to be" if document.device == "cpu" else "at the peaks of the data sheet"
        estimate = f"  estimate: {speeds}" if planned else ""
        lines.append(f"{'step':<16}{document.step_time:>10.3g} s{estimate}")
    if document.budget is not None:
        lines.append(f"{'budget':<16}{format_size(document.budget):>12}  {verdict(document)}")
    if document.generation is not None:
        lines += [
            *([""] if lines[-1] else []),
            *generation(document.generation, document.largest.at_peak.get("kv", 0), document.world_size),
        ]
    if document.detail is not None and document.detail.findings:
        lines += ["", *(finding.sentence(document.world_size) for finding in document.detail.findings)]
    if document.time is not None:
        lines += ["", *tell_time.lines(document.time)]
    return "\n".join(lines)


def generation(planned: Generation, kv_bytes: int, ranks: int) -> list[str]:
    """What keys and values are of, and what would fit."""
    each = " on each rank" if ranks > 1 else ""
    lines = [
        f"keys and values: {format_size(round(planned.token_bytes))} for each token{each}, {format_size(kv_bytes)} in all;"
        f" wanted are {planned.sequences} sequences of {planned.context:,} tokens"
    ]
    if planned.brought_bytes:
        seconds = planned.brought_seconds
        least = "as fast as the files can be read" if seconds is None else f"{seconds:.3g} s at least, at the peak of its link"
        lines = [f"weights: {format_size(planned.brought_bytes)}{each} come to the GPU in every step: {least}", *lines]
    if not planned.largest_context:
        return [*lines, "the budget has no room for one token of each"]
    many = f", or {planned.largest_sequences:,} of {planned.context:,}" if planned.largest_sequences else ""
    return [*lines, f"the budget has room for {planned.sequences} sequences of {planned.largest_context:,} tokens{many}"]


def phases(document: MemoryDocument) -> list[str]:
    """A line for each phase of the rank that takes most."""
    rank = document.largest
    lines = [f"{'phase':<16}{'allocated':>12}{'host':>12}{'files':>12}"]
    for name, phase in rank.phases.items():
        besides = "".join(f"{format_size(nbytes) if nbytes else '':>12}" for nbytes in (phase.host, phase.disk))
        lines.append(f"{name:<16}{format_size(phase.allocated_peak):>12}{besides}".rstrip())
    if "save" in rank.phases:
        lines.append(f"{'checkpoint':<36}{format_size(sum(each.phases['save'].disk for each in document.per_rank)):>16}  of all ranks")
    return lines


def _which(document: MemoryDocument) -> str:
    if document.world_size == 1:
        return "rank 0"
    largest = document.largest  # of thousands
    alike = all(rank.at_peak == largest.at_peak for rank in document.per_rank)
    return "every rank" if alike else f"rank {largest.rank}, most"


def verdict(document: MemoryDocument) -> str:
    """Whether the run fits the budget, which there is, and by how much."""
    assert document.budget is not None
    over = document.largest.taken - document.budget
    return f"does not fit: {format_size(over)} too much" if over > 0 else f"fits, {format_size(-over)} left"


def allocated(rank: RankMemory) -> str:
    """The peak, or from where to where it may be."""
    if rank.allocated_peak_low == rank.allocated_peak:
        return format_size(rank.allocated_peak)
    return f"{format_size(rank.allocated_peak_low)} to {format_size(rank.allocated_peak)}"
