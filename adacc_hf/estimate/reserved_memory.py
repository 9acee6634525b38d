"""Simulation of torch's caching allocator, to predict the GPU memory that training reserves. The model is fake.

The driver and `nvidia-smi` see the segments that the allocator reserved, which are more than the live bytes. The
difference depends on the order of allocations and frees. Therefore a whole step runs on fake tensors, including
gradients and the optimizer's state, and a simulated allocator serves every storage.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import GraphExecGroup, checkpoint

from adacc_hf.estimate.fake_backward import FakeBackward
from adacc_hf.estimate.fake_device import FakeMemoryMeter, fake_autocast
from adacc_hf.estimate.fake_model import FakeModel
from adacc_hf.estimate.static_memory import state_bytes, update_bytes
from adacc_hf.torch_glue.memory import forward_loss

STEPS = 2
"""Number of simulated steps. At the end of the first step, the optimizer's state is allocated in memory that
activations used. In the second step, the activations are therefore allocated elsewhere. A third step reserved nothing
more in any of the published runs."""


def reserved_bytes(
    model: FakeModel, batch_size: int, seq_len: int, optimizer: str, keeps_gradients: bool, is_checkpointed: bool
) -> int:
    """Return the GPU bytes that torch's caching allocator reserves in steps of training without a policy.

    If `is_checkpointed`, torch's checkpoint is around each block. If `keeps_gradients`, gradients stay allocated
    between the steps. Sharding is not simulated, so the model must be on one device. Call this function inside the
    `with` block of `fake_model` that created the model.
    """
    module = model.model
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    log = AllocationLog()
    for tensor in (*module.parameters(), *module.buffers()):
        log.add(tensor.untyped_storage())
    state: list[torch.Tensor] = []  # keeps the optimizer's state alive
    with _checkpointed_blocks(model) if is_checkpointed else nullcontext(), log:
        for _ in range(STEPS if keeps_gradients else 1):
            begin = len(log.events)
            batch = model.batch(batch_size, seq_len)
            with fake_autocast(model.workload.trace, model.autocast):
                loss = forward_loss(module, batch)
            FakeBackward().run(loss)
            del loss, batch
            step = log.events[begin:]
            if not state:
                state = [part for p in trained for part in _allocate_state(state_bytes(optimizer, p), p)]
            begin = len(log.events)
            _allocate_update_temporaries(optimizer, trained)
            if not keeps_gradients:
                module.zero_grad(set_to_none=True)
            step += log.events[begin:]
        events = list(log.events)
    module.zero_grad(set_to_none=True)
    if not keeps_gradients:  # all is freed, and the next steps allocate and free the same sizes in the same order
        freed = {number for number, nbytes in step if nbytes is None}
        events += (STEPS - 1) * [event for event in step if event[0] in freed]
    allocator = CachingAllocator(model.workload.device.memory_bytes)
    for number, nbytes in events:
        if nbytes is None:
            allocator.free(number)
        else:
            allocator.allocate(number, nbytes)
    return allocator.most_reserved_bytes


def _allocate_update_temporaries(optimizer: str, trained: Sequence[torch.Tensor]) -> None:
    """Allocate the temporaries of the optimizer's step, and free them when this function returns."""
    remaining_bytes, temporaries = update_bytes(optimizer, trained), []
    for parameter in trained:
        nbytes = min(remaining_bytes, _tensor_nbytes(parameter))
        remaining_bytes -= nbytes
        temporaries += _allocate_state(nbytes, parameter)


def _allocate_state(nbytes: int, parameter: torch.Tensor) -> list[torch.Tensor]:
    """Allocate `nbytes` as tensors of the size of `parameter`, the last of which may be smaller."""
    sizes = [min(_tensor_nbytes(parameter), nbytes - offset) for offset in range(0, nbytes, _tensor_nbytes(parameter))]
    return [torch.empty(size, dtype=torch.uint8) for size in sizes]


def _tensor_nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


class AllocationLog(FakeMemoryMeter):
    """Meter of fake tensors that lists every allocation and every free."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[int, int | None]] = []
        """(number of the allocation, its bytes, or None when it is freed)."""
        self._numbers: dict[int, int] = {}

    def _on_allocate(self, key: int, nbytes: int) -> None:
        self._numbers[key] = len(self.events)
        self.events.append((len(self.events), nbytes))

    def _on_free(self, key: int) -> None:
        self.events.append((self._numbers.pop(key), None))


@contextmanager
def _checkpointed_blocks(model: FakeModel) -> Iterator[None]:
    """Run each block under torch's checkpoint inside the `with` block."""

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        # Without a GPU, the autocast that torch's checkpoint restores for "cuda" disables itself, with a warning.
        return nullcontext(), fake_autocast(model.workload.trace, model.autocast)

    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, **settings)
    try:
        # Checkpoints identify a backward by its graph task in torch's engine. `FakeBackward` has no graph task.
        with GraphExecGroup(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*CUDA is not available")
            yield
    finally:
        for block in model.blocks:
            del block.forward


# Simulation of torch's caching allocator: its block sizes, its pools and its choice of blocks. The rules are the
# defaults of `torch.cuda`, without expandable segments and with unlimited splits (c10/cuda/CUDACachingAllocator.cpp:
# kMinBlockSize and the neighbouring constants, get_free_block, should_split, release_cached_blocks). The allocator
# requests a segment from the driver if no free block is large enough, and cannot merge blocks of two segments: so it
# reserves more than the live bytes. It returns segments only when the driver is out of memory.

_BLOCK_UNIT = 512
"""Unit in bytes of the sizes of the caching allocator's blocks. Every block size is a multiple of this unit."""
_MAX_SMALL_BLOCK = 2**20
"""Maximum size in bytes of a block in the allocator's small pool, whose segments are `_SMALL_SEGMENT` bytes large."""
_SMALL_SEGMENT = 2 * 2**20
_MIN_LARGE_BLOCK = 10 * 2**20
"""Minimum size in bytes of a block that gets a new segment of its own size, if no free block is large enough. New
segments for smaller blocks of the large pool are `_MEDIUM_SEGMENT` bytes large."""
_MEDIUM_SEGMENT = 20 * 2**20
_SEGMENT_UNIT = 2 * 2**20
"""Unit in bytes of the sizes of the allocator's segments for large blocks."""


class _SegmentBlock:
    """Part of a segment that the caching allocator has reserved, linked with the adjacent parts."""

    __slots__ = ("is_small", "next", "number", "previous", "size")

    def __init__(self, number: int, size: int, is_small: bool) -> None:
        self.number = number
        self.size = size
        self.is_small = is_small
        self.previous: _SegmentBlock | None = None
        self.next: _SegmentBlock | None = None


class CachingAllocator:
    """Simulation of torch's caching allocator on a device of `memory_bytes`.

    Allocations that exceed the device's memory succeed too.
    """

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self.most_reserved_bytes = 0
        """Maximum so far of the bytes that the allocator has reserved."""
        self._reserved_bytes = 0
        self._allocated: dict[Hashable, _SegmentBlock] = {}
        self.free_blocks: dict[bool, list[tuple[int, int, _SegmentBlock]]] = {True: [], False: []}
        """Free blocks of the small pool (True) and the large pool (False), sorted by size, then by age."""
        self._free_numbers: set[int] = set()
        self._num_blocks = 0

    def allocate(self, key: Hashable, nbytes: int) -> None:
        """Allocate a block of `nbytes`, to be freed by `free(key)`. Raises ValueError if a block for `key` exists
        already."""
        if key in self._allocated:
            raise ValueError(f"key {key!r} has a block already: free the block before another allocation")
        if nbytes == 0:
            return
        size = -(-nbytes // _BLOCK_UNIT) * _BLOCK_UNIT
        is_small = size <= _MAX_SMALL_BLOCK
        block = self._take_best_fit(size, is_small) or self._new_segment(size, is_small)
        excess = block.size - size
        if excess >= _BLOCK_UNIT if is_small else excess > _MAX_SMALL_BLOCK:
            self._split(block, size)
        self._allocated[key] = block

    def free(self, key: Hashable) -> None:
        """Free the block that was allocated for `key`, and merge the block with free neighbours.

        Do nothing if `key` has no block, because allocations of 0 bytes have no block.
        """
        block = self._allocated.pop(key, None)
        if block is None:
            return
        for neighbour in (block.previous, block.next):
            if neighbour is not None and neighbour.number in self._free_numbers:
                self._remove_from_pool(neighbour)
                first, second = (neighbour, block) if neighbour is block.previous else (block, neighbour)
                block = _merge_segment_blocks(first, second)
        self._add_to_pool(block)

    def _take_best_fit(self, size: int, is_small: bool) -> _SegmentBlock | None:
        """Remove the smallest free block of at least `size` bytes from its pool, and return it, or None."""
        pool = self.free_blocks[is_small]
        position = bisect_left(pool, (size,))
        if position == len(pool):
            return None
        block = pool[position][2]
        self._remove_from_pool(block)
        return block

    def _new_segment(self, size: int, is_small: bool) -> _SegmentBlock:
        if is_small:
            segment = _SMALL_SEGMENT
        elif size < _MIN_LARGE_BLOCK:
            segment = _MEDIUM_SEGMENT
        else:
            segment = -(-size // _SEGMENT_UNIT) * _SEGMENT_UNIT
        if self._reserved_bytes + segment > self.memory_bytes:
            self._release_segments()
        self._reserved_bytes += segment
        self.most_reserved_bytes = max(self.most_reserved_bytes, self._reserved_bytes)
        return self._new_block(segment, is_small)

    def _release_segments(self) -> None:
        """Return to the driver every segment that consists of a single free block, as torch's allocator does."""
        for pool in self.free_blocks.values():
            for _, _, block in list(pool):
                if block.previous is None and block.next is None:
                    self._remove_from_pool(block)
                    self._reserved_bytes -= block.size

    def _new_block(self, size: int, is_small: bool) -> _SegmentBlock:
        self._num_blocks += 1
        return _SegmentBlock(self._num_blocks, size, is_small)

    def _split(self, block: _SegmentBlock, size: int) -> None:
        rest = self._new_block(block.size - size, block.is_small)
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next, block.size = rest, size
        self._add_to_pool(rest)

    def _add_to_pool(self, block: _SegmentBlock) -> None:
        self._free_numbers.add(block.number)
        insort(self.free_blocks[block.is_small], (block.size, block.number, block))

    def _remove_from_pool(self, block: _SegmentBlock) -> None:
        self._free_numbers.remove(block.number)
        pool = self.free_blocks[block.is_small]
        del pool[bisect_left(pool, (block.size, block.number))]


def _merge_segment_blocks(first: _SegmentBlock, second: _SegmentBlock) -> _SegmentBlock:
    first.size += second.size
    first.next = second.next
    if second.next is not None:
        second.next.previous = first
    return first
