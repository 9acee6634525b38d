"""What the allocator of a GPU keeps after some steps, by letting it serve the steps of a model without memory.

Live bytes are what a step needs; the driver, and with it `nvidia-smi`, sees what the allocator has taken for them. The
order of what comes and goes decides how far the two lie apart: whole steps are run on tensors without memory, with the
gradients and the optimizer's state in the places that they find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from adacc_hf.estimate.caching_allocator import CachingAllocator
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
