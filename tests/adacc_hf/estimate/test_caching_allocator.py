"""The sizes, pools and choices of torch's caching allocator, block by block."""

import random

import pytest

from adacc_hf.estimate.caching_allocator import CachingAllocator

KIB, MIB = 2**10, 2**20


@pytest.fixture
def allocator() -> CachingAllocator:
    return CachingAllocator(1024 * MIB)


@pytest.mark.parametrize(
    ("nbytes", "segment"),
    [
        (0, 0),
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_a_segment_is_taken_for_the_first_block(allocator, nbytes, segment):
    allocator.allocate("block", nbytes)
    assert allocator.most_reserved_bytes == segment
    allocator.free("block")
    assert allocator.most_reserved_bytes == segment
    allocator.allocate("block", nbytes)
    assert allocator.most_reserved_bytes == segment, "the same block serves again"


def test_small_blocks_do_not_come_from_large_segments(allocator):
    allocator.allocate("large", 40 * MIB)
    allocator.free("large")
    allocator.allocate("small", KIB)
    assert allocator.most_reserved_bytes == 42 * MIB


def test_the_rest_of_a_block_serves_others_unless_it_is_little(allocator):
    allocator.allocate("large", 40 * MIB)
    allocator.free("large")
    allocator.allocate("part", 30 * MIB)
    allocator.allocate("rest", 10 * MIB)
    assert allocator.most_reserved_bytes == 40 * MIB
    allocator.free("part")
    allocator.free("rest")
    allocator.allocate("nearly all", 39 * MIB)
    allocator.allocate("a mebibyte and a bit", MIB + 1)
    assert allocator.most_reserved_bytes == 60 * MIB, "1 MiB is not split off"


def test_the_smallest_block_that_is_large_enough_is_taken(allocator):
    for name, size in (("64", 64 * MIB), ("32", 32 * MIB)):
        allocator.allocate(name, size)
    for name in ("64", "32"):
        allocator.free(name)
    allocator.allocate("32 again", 32 * MIB)
    allocator.allocate("64 again", 64 * MIB)
    assert allocator.most_reserved_bytes == 96 * MIB


def test_neighbours_are_joined_and_segments_are_not(allocator):
    allocator.allocate("whole", 60 * MIB)
    allocator.free("whole")
    for name in "abc":
        allocator.allocate(name, 20 * MIB)
    for name in "acb":
        allocator.free(name)
    allocator.allocate("whole", 60 * MIB)
    assert allocator.most_reserved_bytes == 60 * MIB
    allocator.allocate("second", 60 * MIB)
    for name in ("whole", "second"):
        allocator.free(name)
    allocator.allocate("both", 100 * MIB)
    assert allocator.most_reserved_bytes == 220 * MIB


def test_what_is_held_in_the_middle_keeps_the_rest_apart(allocator):
    """Why more is reserved than is live: a gradient in the place of an activation cuts it in two."""
    allocator.allocate("activation", 64 * MIB)
    allocator.free("activation")
    for name in ("first", "gradient"):
        allocator.allocate(name, 16 * MIB)
    allocator.free("first")
    allocator.allocate("activation", 48 * MIB)
    assert allocator.most_reserved_bytes == 64 * MIB + 48 * MIB


def test_what_is_cached_is_given_back_when_the_device_is_full():
    allocator = CachingAllocator(100 * MIB)
    for name in ("free", "cut"):
        allocator.allocate(name, 40 * MIB)
    allocator.free("free")
    allocator.free("cut")
    allocator.allocate("held", 20 * MIB)
    allocator.allocate("large", 50 * MIB)
    assert allocator.most_reserved_bytes == 90 * MIB, "one segment went, the other is in use"
    allocator.allocate("too much", 60 * MIB)
    assert allocator.most_reserved_bytes == 150 * MIB


def test_a_key_has_one_block(allocator):
    allocator.allocate("block", 1)
    with pytest.raises(ValueError, match="'block' has a block already"):
        allocator.allocate("block", 1)


def test_freeing_everything_leaves_whole_segments(allocator):
    """However blocks came and went, all that was reserved can be had again in blocks of the segments' sizes."""
    dice = random.Random(0)
    live: dict[int, int] = {}
    for key in range(2000):
        if live and dice.random() < 0.5:
            gone = dice.choice(list(live))
            allocator.free(gone)
            del live[gone]
        live[key] = int(2 ** dice.uniform(0, 26))
        allocator.allocate(key, live[key])
        assert allocator.most_reserved_bytes >= sum(live.values())
    for key in live:
        allocator.free(key)
    reserved = allocator.most_reserved_bytes
    segments = sorted((size for free in allocator._free.values() for size, _, _ in free), reverse=True)
    assert sum(segments) == reserved
    assert all(size % (2 * MIB) == 0 for size in segments)
