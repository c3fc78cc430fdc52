"""What torch's CUDA caching allocator reserves for a sequence of allocations and frees, worked out without a GPU.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (pytorch/pytorch at 001074d) under default settings, with the constants of
torch 2.13's ``c10/core/AllocatorConfig.h``. One stream and no private pools: memory that several streams use returns later than here, and a
CUDA graph keeps its own.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from fw.config.size import format_size
from fw.errors import RunError
from fw.meter.account import History

MIB = 1024**2
ROUNDING = 512
"""Bytes that every allocation is a multiple of (``kMinBlockSize``)."""
SMALL = MIB
"""The largest allocation of the small pool, in bytes (``kSmallSize``)."""
SMALL_SEGMENT = 2 * MIB
"""Bytes of each segment of the small pool (``kSmallBuffer``)."""
LARGE = 10 * MIB
"""From this many bytes on, an allocation's segment is made to its measure (``kMinLargeAlloc``)."""
LARGE_SEGMENT = 20 * MIB
"""Bytes of the segment that smaller allocations of the large pool share (``large_segment_size``)."""
LARGE_ROUNDING = 2 * MIB
"""Bytes that a segment made to measure is a multiple of (``kRoundLarge``)."""

_ADDRESSES = LARGE_SEGMENT * 2**32
"""Addresses of a segment that grows: more than any device has, and whole pages of either pool."""


class OutOfMemory(RunError):
    """A new segment exceeds the limit even after all that was cached and could be released.

    Attributes:
        requested_bytes: what was to be allocated, rounded.
        allocated_bytes: what is in use.
        reserved_bytes: what the segments hold.
        limit_bytes: the most that they may hold.
    """

    def __init__(self, requested_bytes: int, allocated_bytes: int, reserved_bytes: int, limit_bytes: int) -> None:
        self.requested_bytes, self.allocated_bytes = requested_bytes, allocated_bytes
        self.reserved_bytes, self.limit_bytes = reserved_bytes, limit_bytes
        super().__init__(
            f"no room for {format_size(requested_bytes)}: of {format_size(limit_bytes)}, {format_size(reserved_bytes)} are reserved"
            f" and {format_size(allocated_bytes)} allocated"
        )


@dataclass(frozen=True)
class Span:
    """A block as :meth:`CachingAllocator.snapshot` shows it: ``nbytes`` from ``address`` on."""

    address: int
    nbytes: int
    allocated: bool


@dataclass(frozen=True)
class Segment:
    """Memory reserved in one piece, with its blocks in the order of their addresses."""

    small: bool
    spans: tuple[Span, ...]


@dataclass(eq=False, repr=False)
class _Block:
    address: int
    nbytes: int
    pool: _Pool
    allocated: bool = False
    mapped: bool = True
    """Whether there is memory behind the addresses; always, but in a segment that grows."""
    previous: _Block | None = None
    following: _Block | None = None

    def cut(self, nbytes: int) -> _Block:
        """Keep the first ``nbytes``; the rest, which is free, is a block of its own."""
        rest = _Block(self.address + nbytes, self.nbytes - nbytes, self.pool, mapped=self.mapped, previous=self, following=self.following)
        if rest.following is not None:
            rest.following.previous = rest
        self.nbytes, self.following = nbytes, rest
        return rest

    def absorb_following(self) -> None:
        """Be one block with the following."""
        assert self.following is not None
        self.nbytes += self.following.nbytes
        self.following = self.following.following
        if self.following is not None:
            self.following.previous = self

    def joins(self, other: _Block | None) -> bool:
        """Whether both are free and both or neither have memory."""
        return other is not None and not (self.allocated or other.allocated) and self.mapped == other.mapped

    @property
    def room(self) -> int:
        """Its bytes and those that it could grow by."""
        return self.nbytes + (self.following.nbytes if self.following is not None and not self.following.mapped else 0)


@dataclass(eq=False)
class _Pool:
    small: bool
    cached: list[_Block] = field(default_factory=list)
    """Free blocks from small to large, equal ones by address."""

    def segment_bytes(self, nbytes: int) -> int:
        """Of the segment made for an allocation of ``nbytes``."""
        if self.small:
            return SMALL_SEGMENT
        return LARGE_SEGMENT if nbytes < LARGE else _round_up(nbytes, LARGE_ROUNDING)

    @property
    def page_bytes(self) -> int:
        """What a segment that grows grows by."""
        return SMALL_SEGMENT if self.small else LARGE_SEGMENT

    def add(self, block: _Block) -> None:
        insort(self.cached, block, key=_order)

    def remove(self, block: _Block) -> None:
        del self.cached[bisect_left(self.cached, _order(block), key=_order)]

    def best_fit(self, nbytes: int) -> _Block | None:
        """The smallest free block that holds ``nbytes``; one that can grow counts as large as it can get."""
        place = bisect_left(self.cached, (nbytes, -1), key=_order)
        if place == len(self.cached):
            return None
        while place + 1 < len(self.cached) and self.cached[place + 1].room < self.cached[place].room:
            place += 1
        return self.cached[place]


class CachingAllocator:
    """A device's allocator: blocks are cut from segments, joined again when free, and kept until there is no room for another segment.

    Of free blocks of equal size the one at the lowest address is taken, and where segments lie is the driver's choice: here each lies above
    those before it. A real run may take a block of another segment, and then reserve somewhat more or less.

    Args:
        limit_bytes: the most that segments may hold together, or None for no limit. Before it is exceeded, every segment without an
            allocation is released, as torch does when the driver has no more.
        expandable: as with ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``: one segment for each pool, which grows by pages of 2 MiB
            (small) or 20 MiB (large).

    Attributes:
        allocated_bytes: of blocks in use; ``torch.cuda.memory_allocated``.
        reserved_bytes: of segments; ``torch.cuda.memory_reserved``.
        peak_allocated_bytes, peak_reserved_bytes: the most of each so far.
    """

    def __init__(self, limit_bytes: int | None = None, *, expandable: bool = False) -> None:
        self.limit_bytes, self.expandable = limit_bytes, expandable
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self._small, self._large = _Pool(small=True), _Pool(small=False)
        self._live: dict[Hashable, _Block | None] = {}
        self._heads: dict[int, _Block] = {}  # address of each segment → its first block
        self._top = 0
        if expandable:
            for pool in (self._small, self._large):
                address = self._place(_ADDRESSES)
                self._heads[address] = _Block(address, _ADDRESSES, pool, mapped=False)

    def allocate(self, key: Hashable, nbytes: int) -> None:
        """Give ``nbytes`` to ``key``; none take nothing.

        Raises:
            OutOfMemory: there is no room within ``limit_bytes``.
            ValueError: ``key`` has memory, or ``nbytes`` is negative.
        """
        if key in self._live:
            raise ValueError(f"{key!r} is allocated already")
        if nbytes < 0:
            raise ValueError(f"{nbytes} bytes cannot be allocated")
        block = self._block(_round_up(nbytes, ROUNDING)) if nbytes else None
        self._live[key] = block
        if block is not None:
            self.allocated_bytes += block.nbytes
            self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def free(self, key: Hashable) -> None:
        """Take back what ``key`` was given.

        Raises:
            KeyError: ``key`` has no memory.
        """
        block = self._live.pop(key)
        if block is not None:
            self.allocated_bytes -= block.nbytes
            block.allocated = False
            self._settle(block)

    def empty_cache(self) -> None:
        """Release all segments without an allocation, or, of one that grows, all pages without one."""
        for pool in (self._large, self._small):
            for block in list(pool.cached):
                if self.expandable:
                    self._unmap(block)
                elif block.previous is None and block.following is None:
                    pool.remove(block)
                    del self._heads[block.address]
                    self.reserved_bytes -= block.nbytes

    def address(self, key: Hashable) -> int | None:
        """Of the memory that ``key`` has; None where it was given no bytes."""
        block = self._live[key]
        return None if block is None else block.address

    def snapshot(self) -> list[Segment]:
        """What is reserved, by address; of a segment that grows, each stretch with memory."""
        return [segment for address in sorted(self._heads) for segment in _stretches(self._heads[address])]

    def _place(self, nbytes: int) -> int:
        """Address of a new segment."""
        self._top += nbytes
        return self._top - nbytes

    def _block(self, nbytes: int) -> _Block:
        pool = self._small if nbytes <= SMALL else self._large
        block = pool.best_fit(nbytes) or self._grow(pool, nbytes)
        if block is None:
            self.empty_cache()
            block = self._grow(pool, nbytes)
        if block is None:
            assert self.limit_bytes is not None
            raise OutOfMemory(nbytes, self.allocated_bytes, self.reserved_bytes, self.limit_bytes)
        pool.remove(block)
        rest = block.nbytes - nbytes
        if rest >= ROUNDING if pool.small or self.expandable else rest > SMALL:
            pool.add(block.cut(nbytes))
        block.allocated = True
        return block

    def _settle(self, block: _Block) -> _Block:
        """Join a free block with its free neighbours, and cache it where it has memory."""
        if block.joins(block.following):
            assert block.following is not None
            if block.mapped:
                block.pool.remove(block.following)
            block.absorb_following()
        if block.joins(block.previous):
            assert block.previous is not None
            block = block.previous
            if block.mapped:
                block.pool.remove(block)
            block.absorb_following()
        if block.mapped:
            block.pool.add(block)
        return block

    def _reserve(self, nbytes: int) -> bool:
        """Whether the device gives ``nbytes`` more."""
        if self.limit_bytes is not None and self.reserved_bytes + nbytes > self.limit_bytes:
            return False
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _grow(self, pool: _Pool, nbytes: int) -> _Block | None:
        """A cached block with room for ``nbytes`` of memory that was not reserved before; None where the device has no more."""
        if self.expandable:
            return self._extend(pool, nbytes)
        size = pool.segment_bytes(nbytes)
        if not self._reserve(size):
            return None
        block = _Block(self._place(size), size, pool)
        self._heads[block.address] = block
        pool.add(block)
        return block

    def _extend(self, pool: _Pool, nbytes: int) -> _Block | None:
        """The lowest stretch of free addresses, given as many pages as it lacks."""
        block = next(block for block in self._expandable(pool) if _free_from(block) >= nbytes)
        while not block.mapped or block.nbytes < nbytes:
            gap = block.following if block.mapped else block
            assert gap is not None and not gap.mapped
            lacking = nbytes - (block.nbytes if block.mapped else 0)
            size = min(_round_up(lacking, pool.page_bytes), gap.nbytes)
            if not self._reserve(size):
                return None
            if size < gap.nbytes:
                gap.cut(size)
            gap.mapped = True
            block = self._settle(gap)
        return block

    def _expandable(self, pool: _Pool) -> Iterator[_Block]:
        """Where a stretch that includes addresses without memory may begin: with these, or with the free block before them."""
        (head,) = (head for head in self._heads.values() if head.pool is pool)
        for block in _chain(head):
            if not block.mapped:
                before = block.previous
                yield block if before is None or before.allocated else before

    def _unmap(self, block: _Block) -> None:
        """Release the pages that lie in a free block as a whole."""
        page = block.pool.page_bytes
        begin, end = _round_up(block.address, page), (block.address + block.nbytes) // page * page
        if begin >= end:
            return
        pool = block.pool
        pool.remove(block)
        if block.address < begin:
            before, block = block, block.cut(begin - block.address)
            pool.add(before)
        if block.nbytes > end - begin:
            pool.add(block.cut(end - begin))
        block.mapped = False
        self.reserved_bytes -= block.nbytes
        self._settle(block)


def replay(history: History, limit_bytes: int | None = None, *, expandable: bool = False) -> CachingAllocator:
    """The allocator after all of ``history``: what was there before, allocated in order, then each change.

    Raises:
        OutOfMemory: there was no room within ``limit_bytes``.
    """
    allocator = CachingAllocator(limit_bytes, expandable=expandable)
    for block in history.before:
        allocator.allocate(block, block.nbytes)
    for block, sign in history.changes:
        if sign > 0:
            allocator.allocate(block, block.nbytes)
        else:
            allocator.free(block)
    return allocator


def _round_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


def _order(block: _Block) -> tuple[int, int]:
    return block.nbytes, block.address


def _chain(block: _Block | None) -> Iterator[_Block]:
    """A block and all that follow it in its segment."""
    while block is not None:
        yield block
        block = block.following


def _free_from(block: _Block) -> int:
    """Bytes of addresses free from a block on."""
    total = 0
    for each in _chain(block):
        if each.allocated:
            break
        total += each.nbytes
    return total


def _stretches(head: _Block) -> Iterator[Segment]:
    spans: list[Span] = []
    for block in _chain(head):
        if block.mapped:
            spans.append(Span(block.address, block.nbytes, block.allocated))
        if spans and (not block.mapped or block.following is None):
            yield Segment(head.pool.small, tuple(spans))
            spans = []
