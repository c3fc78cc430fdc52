"""A traced rank's memory and time on a GPU: what its allocator reserves, and what its driver gives out besides."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import NamedTuple

from fw.errors import UserError
from fw.meter.account import Block, History
from fw.meter.devices import Device
from fw.meter.document import RankMemory
from fw.meter.speeds import Speeds
from fw.meter.step_memory import OTHER
from fw.planning.caching_allocator import CachingAllocator
from fw.planning.gpu import RECORDINGS
from fw.planning.nccl import communicators_bytes
from fw.planning.roofline import step_time
from fw.planning.trace import RankTrace
from fw.recipe import Recipe


def check_plannable(recipe: Recipe) -> None:
    """Refuse what would be planned as if it were on the GPU.

    Raises:
        UserError: parameters are offloaded, which FSDP and DeepSpeed move by themselves.
    """
    if recipe.offload.policy().params != "device" and recipe.sharding.moves_parameters:
        raise UserError(
            f"{recipe.config.origin(('offload', 'params'))}: offload.params cannot be planned for a GPU yet; measure it with fw profile,"
            " or plan it without"
        )


def on_gpu(rank: int, trace: RankTrace, device: Device, imported_bytes: int) -> RankMemory:
    """What a rank takes of a GPU's memory and of the host's.

    Args:
        imported_bytes: of the host, for a process that has loaded the same libraries.
    """
    found = RankMemory.of_steps(rank, trace.steps, imported_bytes + trace.host_bytes)
    return with_allocator(found, allocator_peaks(trace.histories), device, trace.groups)


def with_allocator(found: RankMemory, peaks: AllocatorPeaks, device: Device, groups: Set[tuple[int, ...]]) -> RankMemory:
    """What tensors take, and what allocator and driver do for them.

    Args:
        groups: of ranks that exchange something.
    """
    driver = peaks.reserved + device.context_bytes + communicators_bytes(groups)
    rounding = max(0, peaks.allocated - found.allocated_peak)
    at_peak = {**found.at_peak, OTHER: found.at_peak.get(OTHER, 0) + rounding}
    most = {**found.most, OTHER: max(found.most.get(OTHER, 0), at_peak[OTHER])}
    return replace(
        found,
        allocated_peak=found.allocated_peak + rounding,
        allocated_peak_low=found.allocated_peak_low + rounding,
        reserved_peak=peaks.reserved,
        driver_peak=driver,
        at_peak=at_peak,
        most=most,
    )


def slowest_step(trace: RankTrace, device: Speeds, ranks_per_host: int) -> float:
    """Seconds at least, of the slowest step from the second on (phases of precision differ)."""
    return max(step_time(history, device, ranks_per_host, trace.repeated) for history in trace.histories[1:])


class AllocatorPeaks(NamedTuple):
    """The most that torch's caching allocator has at any time.

    Attributes:
        reserved: over all stretches; ``torch.cuda.max_memory_reserved``.
        allocated: in blocks that are in use, from the second stretch on where there are several; ``torch.cuda.max_memory_allocated``.
    """

    reserved: int
    allocated: int


def allocator_peaks(histories: Sequence[History], loading: History | None = None) -> AllocatorPeaks:
    """Of stretches of one program, one after another.

    What comes and goes between two stretches is known by what is there when the next begins; in which order it came, not.

    Args:
        loading: what was before the first, which counts for what it leaves; then all others are what peaks are of.
    """
    allocators: defaultdict[int, CachingAllocator] = defaultdict(CachingAllocator)  # for each stream, what no other is given
    live: dict[Block, None] = {}
    reserved = allocated = reserved_peak = allocated_peak = 0

    def change(block: Block, sign: int) -> None:
        nonlocal reserved, allocated, reserved_peak, allocated_peak
        allocator = allocators[block.stream]
        reserved, allocated = reserved - allocator.reserved_bytes, allocated - allocator.allocated_bytes
        if sign < 0:
            allocator.free(block)
            del live[block]
        else:
            allocator.allocate(block, block.nbytes)
            live[block] = None
        reserved, allocated = reserved + allocator.reserved_bytes, allocated + allocator.allocated_bytes
        reserved_peak, allocated_peak = max(reserved_peak, reserved), max(allocated_peak, allocated)

    def empty_caches() -> None:
        nonlocal reserved
        for stream, allocator in allocators.items():
            if stream != RECORDINGS:
                reserved -= allocator.reserved_bytes
                allocator.empty_cache()
                reserved += allocator.reserved_bytes

    for number, history in enumerate(histories if loading is None else [loading, *histories]):
        if number == 1:
            allocated_peak = 0 if loading is None else allocated
            reserved_peak = reserved_peak if loading is None else reserved
        before = set(history.before)
        for block in [block for block in live if block not in before]:
            change(block, -1)
        for block in history.before:
            if block not in live:
                change(block, 1)
        emptied = deque(history.emptied)
        for count, (block, sign) in enumerate(history.changes):
            while emptied and emptied[0] <= count:
                emptied.popleft()
                empty_caches()
            change(block, sign)
        for _ in emptied:
            empty_caches()
    return AllocatorPeaks(reserved_peak, allocated_peak)
