"""The allocator's rules one by one, from sizes worked out by hand, and what must hold after any sequence."""

from __future__ import annotations

import random

import pytest

from fw.meter.account import Block, History
from fw.planning.caching_allocator import CachingAllocator, OutOfMemory, replay

KIB, MIB = 1024, 1024**2


def spans(allocator: CachingAllocator) -> list[list[tuple[int, bool]]]:
    """Sizes of each segment's blocks, and which are in use."""
    return [[(span.nbytes, span.allocated) for span in segment.spans] for segment in allocator.snapshot()]


@pytest.mark.parametrize(
    ("asked", "allocated"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512), (3_000_000, 3_000_320)]
)
def test_allocations_are_rounded_to_512_bytes(asked, allocated):
    allocator = CachingAllocator()
    allocator.allocate("a", asked)
    assert allocator.allocated_bytes == allocated


@pytest.mark.parametrize(
    ("asked", "reserved"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_a_segment_is_2_or_20_mib_or_made_to_measure(asked, reserved):
    allocator = CachingAllocator()
    allocator.allocate("a", asked)
    assert allocator.reserved_bytes == reserved


def test_no_bytes_take_nothing():
    allocator = CachingAllocator(limit_bytes=0)
    allocator.allocate("a", 0)
    assert allocator.address("a") is None
    allocator.free("a")
    assert allocator.peak_allocated_bytes == allocator.peak_reserved_bytes == 0


def test_small_ones_share_a_segment_and_keep_every_rest_of_512_bytes():
    allocator = CachingAllocator()
    allocator.allocate("a", MIB)
    allocator.allocate("b", MIB - 512)
    assert spans(allocator) == [[(MIB, True), (MIB - 512, True), (512, False)]]
    allocator.allocate("c", 1)
    assert allocator.reserved_bytes == 2 * MIB
    allocator.allocate("d", 1)
    assert allocator.reserved_bytes == 4 * MIB


def test_pools_do_not_help_each_other():
    allocator = CachingAllocator()
    allocator.allocate("large", 2 * MIB)
    allocator.allocate("small", MIB)
    assert allocator.reserved_bytes == 22 * MIB
    allocator.free("large")
    allocator.allocate("small too", MIB)
    allocator.allocate("small again", 512)
    assert allocator.reserved_bytes == 24 * MIB


@pytest.mark.parametrize(("asked", "kept"), [(9 * MIB - 512, False), (9 * MIB, True)])
def test_a_rest_in_the_large_pool_is_used_above_one_mib_only(asked, kept):
    """10 MiB are free: a rest of 1 MiB stays with the allocation, one of 512 bytes more does not."""
    allocator = CachingAllocator()
    allocator.allocate("whole", 10 * MIB)
    allocator.free("whole")
    allocator.allocate("a", asked)
    assert allocator.reserved_bytes == 10 * MIB
    assert spans(allocator) == [[(10 * MIB, True)] if kept else [(asked, True), (MIB + 512, False)]]
    assert allocator.allocated_bytes == (10 * MIB if kept else asked)


def test_the_smallest_block_that_fits_is_taken():
    allocator = CachingAllocator()
    for key, nbytes in (("30", 30 * MIB), ("14", 14 * MIB), ("20", 20 * MIB)):
        allocator.allocate(key, nbytes)
    places = {key: allocator.address(key) for key in ("30", "14", "20")}
    for key in places:
        allocator.free(key)
    allocator.allocate("a", 15 * MIB)
    assert allocator.address("a") == places["20"]
    allocator.allocate("b", 14 * MIB)
    assert allocator.address("b") == places["14"]


def test_of_equal_blocks_the_lowest_is_taken():
    allocator = CachingAllocator()
    for key in "abc":
        allocator.allocate(key, 12 * MIB)
    places = [allocator.address(key) for key in "abc"]
    for key in "cba":
        allocator.free(key)
    for key, place in zip("def", places, strict=True):
        allocator.allocate(key, 12 * MIB)
        assert allocator.address(key) == place


def test_free_neighbours_are_one_block():
    allocator = CachingAllocator()
    for key in "abcd":
        allocator.allocate(key, 4 * MIB)
    allocator.free("b")
    allocator.free("d")
    assert spans(allocator) == [[(4 * MIB, True), (4 * MIB, False), (4 * MIB, True), (8 * MIB, False)]]
    allocator.free("c")
    assert spans(allocator) == [[(4 * MIB, True), (16 * MIB, False)]]
    allocator.allocate("e", 16 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    allocator.free("a")
    allocator.free("e")
    assert spans(allocator) == [[(20 * MIB, False)]]


def test_memory_is_kept_and_used_again():
    allocator = CachingAllocator()
    for _ in range(3):
        allocator.allocate("a", 100 * MIB)
        allocator.free("a")
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 100 * MIB)
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (100 * MIB, 100 * MIB)


def test_fragments_cost_a_segment():
    """16 MiB are free in all, and no 8 of them together."""
    allocator = CachingAllocator()
    for number in range(10):
        allocator.allocate(number, 4 * MIB)
    for number in range(0, 8, 2):
        allocator.free(number)
    allocator.allocate("a", 8 * MIB)
    assert allocator.allocated_bytes == 32 * MIB
    assert allocator.reserved_bytes == 60 * MIB


def test_emptying_the_cache_releases_whole_segments_only():
    allocator = CachingAllocator()
    allocator.allocate("whole", 50 * MIB)
    allocator.allocate("part", 4 * MIB)
    allocator.allocate("stays", 4 * MIB)
    allocator.allocate("small", 1)
    for key in ("whole", "part", "small"):
        allocator.free(key)
    allocator.empty_cache()
    assert spans(allocator) == [[(4 * MIB, False), (4 * MIB, True), (12 * MIB, False)]]
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (20 * MIB, 72 * MIB)


def test_the_cache_is_emptied_before_the_limit_is_exceeded():
    allocator = CachingAllocator(limit_bytes=100 * MIB)
    allocator.allocate("a", 60 * MIB)
    allocator.allocate("b", 40 * MIB)
    allocator.free("a")
    allocator.free("b")
    assert allocator.reserved_bytes == 100 * MIB
    allocator.allocate("c", 80 * MIB)
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (80 * MIB, 100 * MIB)


@pytest.mark.parametrize("expandable", [False, True])
def test_without_room_it_says_what_there_is(expandable):
    allocator = CachingAllocator(limit_bytes=100 * MIB, expandable=expandable)
    allocator.allocate("a", 80 * MIB)
    allocator.allocate("b", 4 * MIB)
    allocator.free("b")
    with pytest.raises(OutOfMemory, match="no room for 30 MiB: of 100 MiB, 80 MiB are reserved and 80 MiB allocated") as raised:
        allocator.allocate("c", 30 * MIB)
    error = raised.value
    assert error.requested_bytes == 30 * MIB
    assert error.allocated_bytes == error.reserved_bytes == 80 * MIB
    assert error.limit_bytes == 100 * MIB
    allocator.free("a")
    allocator.allocate("c", 30 * MIB)  # what failed holds nothing


def test_a_segment_that_grows_has_no_fragments_between_segments():
    """2 × 50 MiB, then 100: two segments of 50 cannot serve it, 100 MiB of one can."""
    needed = {}
    for expandable in (False, True):
        allocator = CachingAllocator(expandable=expandable)
        allocator.allocate("a", 50 * MIB)
        allocator.allocate("b", 50 * MIB)
        allocator.free("a")
        allocator.free("b")
        allocator.allocate("c", 100 * MIB)
        needed[expandable] = allocator.reserved_bytes
    assert needed == {False: 200 * MIB, True: 100 * MIB}


def test_a_segment_grows_by_the_pages_that_are_lacking():
    allocator = CachingAllocator(expandable=True)
    allocator.allocate("a", 30 * MIB)
    assert spans(allocator) == [[(30 * MIB, True), (10 * MIB, False)]]
    allocator.allocate("b", 30 * MIB)  # 10 are there, 20 more are one page
    assert spans(allocator) == [[(30 * MIB, True), (30 * MIB, True)]]
    allocator.allocate("c", 31 * MIB)
    assert allocator.reserved_bytes == 100 * MIB
    allocator.allocate("small", 1)
    assert allocator.reserved_bytes == 102 * MIB
    allocator.allocate("d", 9 * MIB - 512)  # a rest of 512 bytes is a block of its own here
    assert spans(allocator)[1][-2:] == [(9 * MIB - 512, True), (512, False)]


def test_a_block_that_could_grow_is_the_last_choice():
    """2 MiB in the middle and 1.5 MiB at the end are free: the smaller would fit, the larger is taken."""
    allocator = CachingAllocator(expandable=True)
    allocator.allocate("a", 2 * MIB)
    allocator.allocate("b", 16 * MIB + 512 * KIB)
    middle = allocator.address("a")
    allocator.free("a")
    assert spans(allocator) == [[(2 * MIB, False), (16 * MIB + 512 * KIB, True), (1536 * KIB, False)]]
    allocator.allocate("c", 1280 * KIB)
    assert allocator.address("c") == middle


def test_whole_pages_are_released_from_the_middle_and_filled_first():
    allocator = CachingAllocator(expandable=True)
    for key, nbytes in (("a", 10 * MIB), ("b", 50 * MIB), ("c", 20 * MIB)):
        allocator.allocate(key, nbytes)
    start = allocator.address("a")
    allocator.free("b")  # 10 to 60: the pages 20 to 40 and 40 to 60 are free as a whole
    allocator.empty_cache()
    assert allocator.reserved_bytes == 40 * MIB
    assert spans(allocator) == [[(10 * MIB, True), (10 * MIB, False)], [(20 * MIB, True)]]
    allocator.allocate("d", 25 * MIB)
    assert allocator.address("d") == start + 10 * MIB
    assert allocator.reserved_bytes == 60 * MIB


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("limit_bytes", [None, 60 * MIB])
@pytest.mark.parametrize("seed", range(5))
def test_what_holds_after_every_change(seed, limit_bytes, expandable):
    chance = random.Random(seed)
    allocator = CachingAllocator(limit_bytes, expandable=expandable)
    live: dict[int, int] = {}
    refused = 0
    for step in range(600):
        if live and chance.random() < 0.45:
            key = chance.choice(list(live))
            allocator.free(key)
            del live[key]
        elif chance.random() < 0.02:
            allocator.empty_cache()
        else:
            nbytes = int(2 ** chance.uniform(0, 25.5))
            try:
                allocator.allocate(step, nbytes)
                live[step] = nbytes
            except OutOfMemory:
                refused += 1
        check(allocator, live, expandable)
    assert (refused > 0) == (limit_bytes is not None), "the limit is met in these runs"
    for key in live:
        allocator.free(key)
    allocator.empty_cache()
    assert allocator.allocated_bytes == allocator.reserved_bytes == 0
    assert allocator.snapshot() == []


def check(allocator: CachingAllocator, live: dict[int, int], expandable: bool) -> None:
    segments = allocator.snapshot()
    taken = {}
    end = 0
    for segment in segments:
        assert segment.spans[0].address >= end, "segments lie apart"
        end = segment.spans[0].address
        for span in segment.spans:
            assert span.address == end, "blocks tile their segment"
            assert span.nbytes > 0 and span.nbytes % 512 == 0
            end += span.nbytes
            if span.allocated:
                taken[span.address] = (span.nbytes, segment.small)
        for one, other in zip(segment.spans, segment.spans[1:], strict=False):
            assert one.allocated or other.allocated, "free neighbours are one block"
        size = end - segment.spans[0].address
        assert size % (20 * MIB if expandable and not segment.small else 2 * MIB) == 0
        assert expandable or not segment.small or size == 2 * MIB
    assert len(taken) == len(live)
    for key, nbytes in live.items():
        size, small = taken[allocator.address(key)]
        rounded = -(-nbytes // 512) * 512
        slack = 0 if small or expandable else MIB
        assert rounded <= size <= rounded + slack
        assert small == (rounded <= MIB)
    assert allocator.allocated_bytes == sum(size for size, _ in taken.values())
    assert allocator.reserved_bytes == sum(span.nbytes for segment in segments for span in segment.spans)
    assert allocator.allocated_bytes <= allocator.reserved_bytes <= allocator.peak_reserved_bytes
    assert allocator.allocated_bytes <= allocator.peak_allocated_bytes <= allocator.peak_reserved_bytes
    assert allocator.limit_bytes is None or allocator.peak_reserved_bytes <= allocator.limit_bytes


def test_misuse_is_told():
    allocator = CachingAllocator()
    allocator.allocate("a", 1)
    with pytest.raises(ValueError, match="'a' is allocated already"):
        allocator.allocate("a", 1)
    with pytest.raises(ValueError, match="-1 bytes cannot be allocated"):
        allocator.allocate("b", -1)
    allocator.free("a")
    with pytest.raises(KeyError):
        allocator.free("a")


def test_a_history_is_played_from_what_was_there_before():
    weights, gradient, activation = Block(50 * MIB), Block(50 * MIB), Block(30 * MIB)
    history = History(before=[weights])
    history.came(activation)
    history.went(activation)
    history.came(gradient)
    history.went(weights)
    allocator = replay(history)
    assert allocator.allocated_bytes == 50 * MIB
    assert allocator.peak_allocated_bytes == 100 * MIB
    assert allocator.reserved_bytes == 130 * MIB, "the activation's segment is too small for the gradient"
    assert replay(history, expandable=True).peak_reserved_bytes == 100 * MIB
    assert replay(history, limit_bytes=100 * MIB).peak_reserved_bytes == 100 * MIB
    with pytest.raises(OutOfMemory):
        replay(history, limit_bytes=99 * MIB)
