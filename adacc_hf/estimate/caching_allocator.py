"""What torch's caching allocator takes from a GPU for blocks that come and go: its sizes, its pools and its choice.

The rules are those of `torch.cuda` without expandable segments and with unlimited splits, its default
(c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize and the constants beside it, get_free_block, should_split,
release_cached_blocks). It asks the driver for a segment whenever no free block is large enough, and cannot join blocks
of two segments: so it keeps more than is live. It gives segments back only when the driver has no more.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable

_UNIT = 512
"""Bytes that every block is a multiple of."""
_SMALL = 2**20
"""Blocks of no more come from segments of `_SMALL_SEGMENT`, in a pool of their own."""
_SMALL_SEGMENT = 2 * 2**20
_MEDIUM = 10 * 2**20
"""Larger blocks below this come from segments of `_MEDIUM_SEGMENT`; from here on each may have a segment of its own."""
_MEDIUM_SEGMENT = 20 * 2**20
_SEGMENT_UNIT = 2 * 2**20
"""Bytes that a segment of its own is a multiple of."""


class _Block:
    """A stretch of a segment, with its neighbours in it."""

    __slots__ = ("is_small", "next", "number", "previous", "size")

    def __init__(self, number: int, size: int, is_small: bool) -> None:
        self.number = number
        self.size = size
        self.is_small = is_small
        self.previous: _Block | None = None
        self.next: _Block | None = None


class CachingAllocator:
    """Counts what is reserved on a device of `memory_bytes`. What goes beyond is taken all the same."""

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self.most_reserved_bytes = 0
        """The most that the driver ever saw of it."""
        self._reserved_bytes = 0
        self._used: dict[Hashable, _Block] = {}
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}
        """Free blocks of each pool by size, then by age."""
        self._in_pool: set[int] = set()
        self._num_blocks = 0

    def allocate(self, key: Hashable, nbytes: int) -> None:
        """Take a block of `nbytes` that `free(key)` gives back. Raises ValueError for a key that has one."""
        if key in self._used:
            raise ValueError(f"key {key!r} has a block already: free it first")
        if nbytes == 0:
            return
        size = -(-nbytes // _UNIT) * _UNIT
        is_small = size <= _SMALL
        block = self._smallest(size, is_small) or self._new_segment(size, is_small)
        rest = block.size - size
        if rest >= _UNIT if is_small else rest > _SMALL:
            self._split(block, size)
        self._used[key] = block

    def free(self, key: Hashable) -> None:
        """Give the block of `key` back, joined with free neighbours. A key without any, of 0 bytes, is let pass."""
        block = self._used.pop(key, None)
        if block is None:
            return
        for neighbour in (block.previous, block.next):
            if neighbour is not None and neighbour.number in self._in_pool:
                self._leave_pool(neighbour)
                first, second = (neighbour, block) if neighbour is block.previous else (block, neighbour)
                block = _joined(first, second)
        self._enter_pool(block)

    def _smallest(self, size: int, is_small: bool) -> _Block | None:
        """The smallest free block of at least `size`, taken out of its pool."""
        pool = self._free[is_small]
        position = bisect_left(pool, (size,))
        if position == len(pool):
            return None
        block = pool[position][2]
        self._leave_pool(block)
        return block

    def _new_segment(self, size: int, is_small: bool) -> _Block:
        if is_small:
            segment = _SMALL_SEGMENT
        elif size < _MEDIUM:
            segment = _MEDIUM_SEGMENT
        else:
            segment = -(-size // _SEGMENT_UNIT) * _SEGMENT_UNIT
        if self._reserved_bytes + segment > self.memory_bytes:
            self._release_segments()
        self._reserved_bytes += segment
        self.most_reserved_bytes = max(self.most_reserved_bytes, self._reserved_bytes)
        return self._new_block(segment, is_small)

    def _release_segments(self) -> None:
        """Give back every segment that is one free block."""
        for pool in self._free.values():
            for _, _, block in list(pool):
                if block.previous is None and block.next is None:
                    self._leave_pool(block)
                    self._reserved_bytes -= block.size

    def _new_block(self, size: int, is_small: bool) -> _Block:
        self._num_blocks += 1
        return _Block(self._num_blocks, size, is_small)

    def _split(self, block: _Block, size: int) -> None:
        rest = self._new_block(block.size - size, block.is_small)
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next, block.size = rest, size
        self._enter_pool(rest)

    def _enter_pool(self, block: _Block) -> None:
        self._in_pool.add(block.number)
        insort(self._free[block.is_small], (block.size, block.number, block))

    def _leave_pool(self, block: _Block) -> None:
        self._in_pool.remove(block.number)
        pool = self._free[block.is_small]
        del pool[bisect_left(pool, (block.size, block.number))]


def _joined(first: _Block, second: _Block) -> _Block:
    """`first` with the block after it."""
    first.size += second.size
    first.next = second.next
    if second.next is not None:
        second.next.previous = first
    return first
