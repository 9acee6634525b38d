"""The memory of a second head (output layer and loss), measured in the forward that stores nothing.

The memory of a step with the chunked head differs from the memory with the plain head only after the last block's
forward, and before the last block's backward. Therefore, the blocks need not be recomputed to measure the second head:
bridges take the place of the blocks in autograd's graph, so that the backward runs only the rest of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from adacc_hf.price.batch_subsampling import Batch
from adacc_hf.price.memory_probes import CallMarker, LiveStorages
from adacc_hf.price.memory_profile import HEAD, ForwardLayout, StepLayout, head_point, measure_forward, peak_between
from adacc_hf.price.model_recording import ModelRecording
from adacc_hf.price.profiled_model import ProfiledModel
from adacc_hf.run.blocks import Strategy
from adacc_hf.torch_glue.distributed import is_sharded
from adacc_hf.torch_glue.memory import MemoryMeter, MemoryPoint
from adacc_hf.torch_glue.private import tree_leaves, tree_map


@dataclass(frozen=True, kw_only=True)
class HeadMemory:
    """The memory of a head in bytes relative to the call of the output layer, in a forward in which blocks store
    nothing."""

    stored_bytes: int
    """Live bytes at the start of backward, without the loss."""
    forward_peak_bytes: int
    backward_peak_bytes: int
    """Peak from the start of backward to the start of the first block's backward."""
    first_backward: tuple[str, int] | None
    """(name of the block call whose backward is the first, live bytes at its start), or None if no block has a
    backward."""
    tail_bytes: int | None
    """Peak after the backward of all blocks, relative to the live bytes at its start. None if no operator runs then."""

    def layout(self, step: StepLayout) -> StepLayout:
        """Return the memory of a step with this head. `step` is the memory of the same step with another head."""
        assert step.head_start is not None
        start, change = step.head_start.live_bytes, 0
        if self.first_backward is not None:
            name, live_bytes = self.first_backward
            change = start + live_bytes - step.bases[name]
        return replace(
            step,
            # A block without a backward has no peak, and the base 0.
            bases={name: base + change if name in step.peaks else base for name, base in step.bases.items()},
            outside_stored_bytes=start + self.stored_bytes,
            outside_peak_bytes=max(step.head_start.peak_bytes, start + self.forward_peak_bytes),
            loss_peak_bytes=start + self.backward_peak_bytes,
            tail_peak_bytes=0 if self.tail_bytes is None else step.tail_start_bytes + change + self.tail_bytes,
        )


def can_bridge_blocks(profiled: ProfiledModel, recording: ModelRecording) -> bool:
    """Return True if bridges can take the place of the blocks while the memory of a second head is measured.

    The rest of the model must run after all blocks, and not between two calls of a block, and no rank may depend on the
    backward of another.
    """
    calls_once = all(block.name in profiled.installation.blocks for block in recording.blocks)
    return calls_once and not recording.calls_before_rest and not is_sharded(profiled.installation.model)


def measure_forward_and_head(
    profiled: ProfiledModel, batch: Batch, recording: ModelRecording
) -> tuple[ForwardLayout, HeadMemory | None]:
    """Run one forward of `batch` in which blocks store nothing, and the backward of the rest of the model.

    Return the measured memory of the forward by block, and the memory of the head with which the model runs. The memory
    of the head is None if it must be measured in a whole step.
    """
    readings = _HeadReadings(profiled, list(profiled.installation.functions))
    with _earlier_gradients(profiled):
        forward = measure_forward(profiled, batch, recording, readings)
    return forward, readings.memory()


@contextmanager
def _earlier_gradients(profiled: ProfiledModel) -> Iterator[None]:
    """Make the gradients that earlier micro-batches leave live in the `with` block, if the step accumulates
    gradients. Drop all gradients at the end."""
    try:
        if profiled.step.gradient_accumulation_steps > 1:
            in_blocks = {id(p) for block in profiled.installation.modules.values() for p in block.parameters()}
            for parameter in profiled.model.parameters():
                if parameter.requires_grad and id(parameter) not in in_blocks:
                    parameter.grad = torch.zeros_like(parameter)
        yield
    finally:
        profiled.model.zero_grad(set_to_none=True)


class _HeadReadings:
    """Observer of a forward (`measure_forward`) that bridges the blocks, and then runs the backward of the rest of the
    model."""

    def __init__(self, profiled: ProfiledModel, names: Sequence[str]) -> None:
        self._measurement = profiled.measurement
        self._names = names
        # Autograd must reach a block that reads no differentiable tensor, but whose parameters are trained.
        self._anchor = torch.zeros((), device=profiled.device, requires_grad=True)
        self._trained_calls: set[str] = set()
        self._points: Sequence[MemoryPoint] = ()
        self._loss_bytes = 0
        self._inputs = LiveStorages()
        """Storages of the tensors that blocks get as arguments."""
        self._live_replay_inputs: dict[int, int] = {}
        self._live_inputs: dict[int, int] = {}
        """Bytes of the storages that are alive at the call of the output layer."""
        self._freed_replay_bytes = 0
        """Bytes of replay inputs that were freed between that call and the backward. A step keeps them for replay."""
        self._has_freed_inputs = False
        """True if other arguments of blocks were freed between that call and the backward. A step may keep them."""

    def strategy(self, name: str, probe: Strategy, meter: MemoryMeter) -> Strategy:
        """Return a strategy that runs `probe`, and puts a bridge in the place of the block call `name`."""
        bridge = _BridgeStrategy(probe, self._anchor, self._inputs)
        is_first = name == self._names[0]
        return CallMarker(name, bridge, meter, self._measurement, is_first=is_first, trained_calls=self._trained_calls)

    def note_head_start(self, replay_storages: LiveStorages) -> None:
        """Handle a call of the output layer."""
        self._live_replay_inputs = self._live_replay_inputs or replay_storages.live()
        self._live_inputs = self._inputs.live()

    def run_backward(self, loss: torch.Tensor, replay_storages: LiveStorages) -> None:
        """Run the backward from `loss`, while memory is measured."""
        freed = self._live_replay_inputs.keys() - replay_storages.live().keys()
        self._freed_replay_bytes = sum(self._live_replay_inputs[key] for key in freed)
        freed_inputs = self._live_inputs.keys() - self._inputs.live().keys()
        self._has_freed_inputs = bool(freed_inputs - self._live_replay_inputs.keys())
        self._measurement.backward(loss)
        self._loss_bytes = loss.untyped_storage().nbytes()

    def note(self, points: Sequence[MemoryPoint]) -> None:
        """Take the readings of the meter."""
        self._points = points

    def memory(self) -> HeadMemory | None:
        """Return the memory of the head, or None if a step may keep tensors alive that this forward has freed, or if
        the model did not call its output layer."""
        points, last = self._points, ("leave", self._names[-1])
        head = head_point(points, last)
        if self._has_freed_inputs or head is None:
            return None
        start = head.live_bytes
        backward_start = start - self._freed_replay_bytes
        loss = next(point for point in points if point.label == ("loss",))
        backward = next((point for point in points if point.label[0] == "backward"), None)
        tail = next((point for point in points if point.label[0] == "tail"), None)
        return HeadMemory(
            stored_bytes=loss.live_bytes - backward_start - self._loss_bytes,
            forward_peak_bytes=peak_between(points[points.index(head) :], HEAD, "loss") - start,
            backward_peak_bytes=peak_between(points, loss.label, "backward") - backward_start,
            first_backward=None if backward is None else (backward.label[1], backward.live_bytes - backward_start),
            tail_bytes=None if tail is None else peak_between(points, tail.label, None) - tail.live_bytes,
        )


class _BridgeStrategy:
    """Strategy that runs a block with the strategy `inner`, and puts a bridge in its place in autograd's graph."""

    def __init__(self, inner: Strategy, anchor: torch.Tensor, arguments: LiveStorages) -> None:
        self.inner = inner
        self._anchor = anchor
        self._arguments = arguments

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._arguments.add(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        result = self.inner.run(block, fn, args, kwargs)
        inputs = _differentiable_tensors((args, kwargs))
        outputs = _differentiable_tensors(result)
        if not outputs:
            return result
        bridged = _Bridge.apply(self._anchor, *inputs, _Outputs(outputs))
        replacements = {id(output): tensor for output, tensor in zip(outputs, bridged, strict=True)}
        return tree_map(lambda leaf: replacements.get(id(leaf), leaf), result)


def _differentiable_tensors(tree: Any) -> list[torch.Tensor]:
    """Return the distinct tensors in `tree` that require a gradient."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return list({id(tensor): tensor for tensor in tensors}.values())


class _Outputs:
    """Tensors that a block returned, detached from the block's graph, and the nodes of the graph."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tuple(tensor.detach() for tensor in tensors)
        self.nodes = [tensor.grad_fn for tensor in tensors]
        """Nodes that keep the block's graph alive, and with it the tensors that several blocks share."""


class _Bridge(torch.autograd.Function):
    """Autograd function that returns a block's results. Its backward does not run the block's backward, but passes
    zeros to the block's inputs."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
        *inputs, outputs = arguments  # tensors first, as FakeBackward expects
        ctx.set_materialize_grads(False)
        ctx.nodes = outputs.nodes
        ctx.inputs = [(tensor.shape, tensor.dtype, tensor.device) for tensor in inputs]
        return outputs.tensors

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.nodes = []
        return (None, *(torch.zeros(s, dtype=dtype, device=device) for s, dtype, device in ctx.inputs), None)
