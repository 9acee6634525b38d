"""What the allocator of a GPU keeps after some steps, by letting it serve the steps of a model without memory.

Live bytes are what a step needs; the driver, and with it `nvidia-smi`, sees what the allocator has taken for them. The
order of what comes and goes decides how far the two lie apart: whole steps are run on tensors without memory, with the
gradients and the optimizer's state in the places that they find.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from adacc_hf.estimate.fake_backward import FakeBackward
from adacc_hf.estimate.fake_device import FakeMemoryMeter, fake_autocast
from adacc_hf.estimate.fake_model import FakeModel
from adacc_hf.estimate.static_memory import state_bytes, update_bytes
from adacc_hf.torch_glue.memory import forward_loss

STEPS = 2
"""The first makes the optimizer's state in the place of activations, the second has to find other places for these. A
third took nothing more in any of the published runs."""


def reserved_bytes(
    model: FakeModel, batch_size: int, seq_len: int, optimizer: str, keeps_gradients: bool, is_checkpointed: bool
) -> int:
    """What the caching allocator keeps of a GPU after steps of plain training, or of torch's checkpoint on each block.

    With `keeps_gradients` those of one step are there in the next. The model must be whole on one device: of sharding
    nothing is known here. Call within the model's `fake_model`.
    """
    whole = model.model
    trained = [parameter for parameter in whole.parameters() if parameter.requires_grad]
    meter = _AllocatorMeter(model.workload.device.memory_bytes)
    for tensor in (*whole.parameters(), *whole.buffers()):
        meter.add(tensor.untyped_storage())
    state: list[torch.Tensor] = []
    with ExitStack() as stack:
        if is_checkpointed:
            stack.enter_context(_checkpointed(model))
        stack.enter_context(meter)
        for _ in range(STEPS):
            batch = model.batch(batch_size, seq_len)
            with fake_autocast(model.workload.trace, model.autocast):
                loss = forward_loss(whole, batch)
            FakeBackward().run(loss)
            del loss, batch
            if not state:
                state = [part for p in trained for part in _of_bytes(state_bytes(optimizer, p), p)]
            _pass_by(optimizer, trained)
            if not keeps_gradients:
                whole.zero_grad(set_to_none=True)
        reserved = meter.allocator.most_reserved_bytes
    whole.zero_grad(set_to_none=True)
    return reserved


def _pass_by(optimizer: str, trained: Sequence[torch.Tensor]) -> None:
    """Make the temporaries of the optimizer's step, and let them go."""
    left, made = update_bytes(optimizer, trained), []
    for parameter in trained:
        taken = min(left, _nbytes(parameter))
        left -= taken
        made += _of_bytes(taken, parameter)


def _of_bytes(nbytes: int, parameter: torch.Tensor) -> list[torch.Tensor]:
    """Tensors of `nbytes` together, each as large as `parameter` but for the last."""
    sizes = [min(_nbytes(parameter), nbytes - done) for done in range(0, nbytes, _nbytes(parameter))]
    return [torch.empty(size, dtype=torch.uint8) for size in sizes]


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


class _AllocatorMeter(FakeMemoryMeter):
    """Has an allocator serve the storages that operators make."""

    def __init__(self, memory_bytes: int) -> None:
        super().__init__()
        self.allocator = CachingAllocator(memory_bytes)

    def _born(self, key: int, nbytes: int) -> None:
        self.allocator.allocate(key, nbytes)

    def _died(self, key: int) -> None:
        self.allocator.free(key)


# Torch's checkpoint, which asks its engine for the backward that runs: there is none here.


@contextmanager
def _checkpointed(model: FakeModel) -> Iterator[None]:
    """While open, each block keeps its inputs alone, and runs again when its backward asks for something."""
    for block in model.blocks:
        block.forward = _Checkpoint(model, block.forward)
    try:
        yield
    finally:
        for block in model.blocks:
            del block.forward


class _AllMadeError(Exception):
    """All that backward will ask for has been made again."""


class _Checkpoint:
    """A block's forward that is run once more in its backward, up to the last tensor that autograd saves."""

    def __init__(self, model: FakeModel, forward: Callable[..., Any]) -> None:
        self._model = model
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made: list[torch.Tensor | None] = []
        count = 0

        def number(_: torch.Tensor) -> int:
            nonlocal count
            count += 1
            return count - 1

        def made_again(index: int) -> torch.Tensor:
            if not made or made[index] is None:
                made[:] = self._run_again(count, args, kwargs)
            tensor, made[index] = made[index], None  # let go of as soon as the node has it
            assert tensor is not None
            return tensor

        with saved_tensors_hooks(number, made_again):
            return self._forward(*args, **kwargs)

    def _run_again(self, count: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        saved: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor) -> None:
            saved.append(tensor.detach())
            if len(saved) == count:
                raise _AllMadeError

        def asked(_: None) -> torch.Tensor:
            raise AssertionError("nothing runs backward through what is made again")

        workload = self._model.workload
        with torch.enable_grad(), saved_tensors_hooks(keep, asked), fake_autocast(workload.trace, self._model.autocast):
            try:
                self._forward(*args, **kwargs)
            except _AllMadeError as stop:
                stop.__traceback__ = None  # its frames hold what the forward made
        return saved


# Torch's caching allocator: its sizes, its pools and its choice. The rules are those of `torch.cuda` without expandable
# segments and with unlimited splits, its default (c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize and the constants
# beside it, get_free_block, should_split, release_cached_blocks). It asks the driver for a segment whenever no free
# block is large enough, and cannot join blocks of two segments: so it keeps more than is live. It gives segments back
# only when the driver has no more.

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
