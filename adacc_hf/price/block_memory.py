"""Memory of one block, measured on a recorded call that runs again alone.

A forward that stores nothing shows when forward frees each value. A forward and backward that stores everything shows
when backward unpacks and frees each saved tensor, and the memory of gradients and temporaries.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import replace
from difflib import SequenceMatcher
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from adacc_hf.artifacts.kind_profile import BackwardEvent, ForwardEvent
from adacc_hf.artifacts.tiles import Tiling
from adacc_hf.price.measurement import Measurement
from adacc_hf.tape.tape import Tape
from adacc_hf.tape.tiled_rows import run_in_tiles, run_on_parameters, trainable_parameters, watching_tiles
from adacc_hf.torch_glue.memory import garbage_collection_disabled
from adacc_hf.torch_glue.meters import MemoryMeter, MemoryPoint
from adacc_hf.torch_glue.private import storage_key, tree_leaves, tree_map
from adacc_hf.torch_glue.tensors import local_of, storage_of
from adacc_hf.torch_glue.zero3 import saved_tensor, without_gathered_memory

TILES = ("begin tiles", "end tiles")
"""First parts of a meter's labels where a module begins and stops running in tiles. The second part is its index."""


class BlockMemory(NamedTuple):
    """Memory events of one block call, in bytes above the live bytes at the start of its forward and backward."""

    forward: tuple[ForwardEvent, ...] = ()
    backward: tuple[BackwardEvent, ...] = ()
    """Empty if no result of the call requires a gradient."""


class RepeatedCall(NamedTuple):
    """Call of a block that can run again, on new copies of its parameters, which share their memory."""

    run: Callable[[_Leaves], Any]
    num_results: int
    """Number of results that require gradients."""
    written: Set[int]
    """Storages of inputs that the call writes to, of which each run gets copies."""

    @staticmethod
    def of_graph(graph: Callable[..., Any], inputs: Sequence[Any], num_results: int, written: Set[int]) -> RepeatedCall:
        """Return a call that runs a traced `graph`."""
        return RepeatedCall(lambda leaves: graph(*map(leaves.of, inputs)), num_results, written)

    @staticmethod
    def of_block(
        block: nn.Module,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        tiling: Tiling | None,
        num_results: int,
        written: Set[int],
    ) -> RepeatedCall:
        """Return a call that runs the block's own code, in tiles if `tiling` is given."""

        def run(leaves: _Leaves) -> Any:
            called = fn
            if isinstance(fn, partial):
                called = partial(fn.func, *tree_map(leaves.of, fn.args), **tree_map(leaves.of, fn.keywords))
            parameters, arguments = trainable_parameters(block), tree_map(leaves.of, args)
            if tiling is None:
                copies = {name: leaves.of(parameter) for name, parameter in parameters.items()}
                return run_on_parameters(block, called, copies, arguments)
            # Backward looks up the parameters of a module in tiles again, so it must find its own.
            torch.clear_autocast_cache()
            leaves.note_gradients(parameters.values())
            return run_in_tiles(block, tiling, called, *arguments)

        return RepeatedCall(run, num_results, written)


class _Leaves:
    """Leaf tensors with the memory of a call's inputs, for one run of the call. If `has_gradients`, those of parameters
    have gradients already."""

    def __init__(self, written: Set[int], has_gradients: bool) -> None:
        self._written, self._has_gradients = written, has_gradients
        self.made: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        """Return the leaf for a tensor that requires a gradient (a clone if the call writes to it), else `value`."""
        if id(value) not in self.made:
            self.made[id(value)] = self._make(value)
        return self.made[id(value)]

    def note_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Give `parameters` gradients, if the call's parameters have gradients already."""
        for parameter in parameters if self._has_gradients else ():
            parameter.grad = torch.zeros_like(parameter)

    def _make(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        is_parameter = isinstance(value, nn.Parameter)
        leaf = value.detach().requires_grad_() if value.requires_grad else value
        if is_parameter and value.requires_grad:
            leaf = nn.Parameter(leaf.detach()) if type(value) is nn.Parameter else leaf
            vars(leaf).update(vars(value))
            self.note_gradients([leaf])
        if storage_key(storage_of(value)) in self._written:
            return leaf.clone()
        # Autocast caches its casts of leaves only.
        return leaf if value.grad_fn is None else leaf.view_as(leaf)


def measure_block(
    call: RepeatedCall,
    graph: RepeatedCall,
    tape: Tape,
    dead_slots: frozenset[int],
    measurement: Measurement,
    has_gradients: bool,
) -> BlockMemory:
    """Run the forward of `call`, and forward and backward of `graph`, and return the memory events.

    `dead_slots` are the saved tensors that the forward itself frees. If `has_gradients`, the parameters have gradients
    already. A traced graph may have somewhat other operators than `tape`, so saved tensors are matched in their order.
    """
    device = tape.values[0].device
    with garbage_collection_disabled():
        with measurement.meter(device) as forward:
            in_forward = _run_forward(call, forward)
        with measurement.meter(device) as backward:
            in_backward = _run_backward(graph, backward, measurement, has_gradients)
    return BlockMemory(
        _forward_events(forward.points, _Slots(tape, dead_slots, in_forward)),
        _backward_events(backward.points, _Slots(tape, dead_slots, in_backward)),
    )


class _SavedTensors:
    """Signatures and storages of the tensors that autograd has saved in a running call, in their order."""

    def __init__(self) -> None:
        self.signatures: list[tuple[tuple[int, ...], torch.dtype]] = []
        self.storages: list[StorageWeakRef] = []
        self.survivors: set[int] = set()
        """Numbers of the saved tensors whose storages were alive at the end, in autocast's cache for example."""

    def add(self, tensor: torch.Tensor) -> int:
        """Add a saved tensor, and return its number."""
        local = local_of(tensor)
        self.signatures.append((tuple(local.shape), local.dtype))
        self.storages.append(StorageWeakRef(local.untyped_storage()))
        return len(self.storages) - 1

    def note_survivors(self) -> None:
        self.survivors = {number for number, storage in enumerate(self.storages) if not storage.expired()}


class _Slots:
    """Saved tensors of a call that ran again, by their slots and values on the call's tape."""

    def __init__(self, tape: Tape, dead_slots: frozenset[int], saved: _SavedTensors) -> None:
        self.values = [-1 if tape.is_held_elsewhere(ref.value) else ref.value for ref in tape.slots]
        self.dead = dead_slots
        self.nbytes = {v: tape.values[v].nbytes for v in self.values if v >= 0 and tape.values[v].producer is not None}
        """Bytes of each saved value that the call computes."""
        self.numbers = [-1] * len(saved.signatures)
        """Slot of each saved tensor, or -1 if the tape lacks it."""
        signatures = [(tuple(ref.geometry[0]), ref.dtype) for ref in tape.slots]
        matcher = SequenceMatcher(None, signatures, saved.signatures, autojunk=False)
        for on_tape, in_call, size in matcher.get_matching_blocks():
            self.numbers[in_call : in_call + size] = range(on_tape, on_tape + size)
        self.survivors = {self.values[self.numbers[number]] for number in saved.survivors if self.numbers[number] >= 0}

    @property
    def missing(self) -> list[int]:
        """Slots that the call that ran again did not save, the last one first."""
        return sorted(set(range(len(self.values))) - set(self.numbers) - self.dead, reverse=True)

    def value_in_forward(self, number: int) -> int:
        """Return the value of a saved tensor, or -1 if a policy does not change how long it lives in forward."""
        slot = self.numbers[number]
        return -1 if slot < 0 or slot in self.dead else self.values[slot]


def _run_forward(call: RepeatedCall, meter: MemoryMeter) -> _SavedTensors:
    """Run a forward that stores nothing for backward, and mark when a tensor is saved and when a storage is freed.
    Return the saved tensors."""
    saved, keys = _SavedTensors(), set[int]()
    mark = torch.compiler.disable(meter.mark)  # Dynamo would trace finalizers inside a compiled submodule

    @torch.compiler.disable
    def pack(tensor: torch.Tensor) -> None:
        storage = local_of(tensor).untyped_storage()
        number = saved.add(tensor)
        meter.mark(("pack", number))
        if storage_key(storage) not in keys:
            keys.add(storage_key(storage))
            weakref.finalize(storage, mark, ("death", number), storage.nbytes()).atexit = False

    with torch.autograd.graph.saved_tensors_hooks(pack, refuse_backward), watching_tiles(partial(_mark_tiles, meter)):
        meter.mark(("enter", -1))
        result = call.run(_Leaves(call.written, False))
    meter.mark(("leave", -1))
    del result
    return saved


def _mark_tiles(meter: MemoryMeter, moment: str, module: int) -> None:
    """Mark the begin or the end of a module in tiles."""
    meter.mark((f"{moment} tiles", module))


def refuse_backward(_: Any) -> torch.Tensor:
    """Raise ValueError, because the model's own code runs a backward before it returns the loss."""
    raise ValueError(
        "the loss runs a backward of its own before it is returned, within a block or around it (a gradient penalty, "
        "forces as gradients of an energy, or a loss that embeds small batches one by one, such as "
        "CachedMultipleNegativesRankingLoss, which saves the memory already): train without adacc_hf, or with another "
        "loss"
    )


def _forward_events(points: Sequence[MemoryPoint], slots: _Slots) -> tuple[ForwardEvent, ...]:
    labels = [point.label[0] for point in points]
    begin, end = labels.index("enter"), labels.index("leave")
    base_bytes, events = points[begin].live_bytes, list[ForwardEvent]()
    tiled_module: int | None = None
    noted: set[tuple[str, int]] = set()
    for point in points[begin:end]:
        moment, index = point.label
        extra_bytes = point.max_bytes - base_bytes
        if moment in TILES:
            tiled_module, index = index if moment == TILES[0] else None, -1
        elif moment != "enter":
            index = slots.value_in_forward(index)
            if index < 0 or (moment, index) in noted or (moment == "death" and index not in slots.nbytes):
                events[-1] = replace(events[-1], extra_bytes=max(events[-1].extra_bytes, extra_bytes))
                continue
            noted.add((moment, index))
        events.append(ForwardEvent(value=index, death=moment == "death", extra_bytes=extra_bytes, tiled=tiled_module))
    return tuple(events)


class TrackedTensor:
    """Packed saved tensor that records the event "release" when autograd frees it."""

    __slots__ = ("mark", "slot", "tensor")

    def __init__(self, slot: int, tensor: torch.Tensor, mark: Callable[[Any], None]) -> None:
        self.slot = slot
        self.tensor = without_gathered_memory(tensor)
        self.mark = mark

    def __del__(self) -> None:
        del self.tensor
        self.mark(("release", self.slot))


def _run_backward(
    call: RepeatedCall, meter: MemoryMeter, measurement: Measurement, has_gradients: bool
) -> _SavedTensors:
    """Run a forward that stores everything, and its backward, and mark when saved tensors are unpacked and freed.
    Return the saved tensors."""
    saved = _SavedTensors()

    @torch.compiler.disable
    def pack(tensor: torch.Tensor) -> TrackedTensor:
        return TrackedTensor(saved.add(tensor), tensor, meter.mark)

    @torch.compiler.disable
    def unpack(packed: TrackedTensor) -> torch.Tensor:
        packed.mark(("unpack", packed.slot))
        return saved_tensor(packed.tensor)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack), watching_tiles(partial(_mark_tiles, meter)):
        leaves = _Leaves(call.written, has_gradients)  # keep the gradients alive
        results = _results(call, leaves)
    if results:
        measurement.on_gradient(results[0], partial(meter.mark, ("backward", -1)))
        loss = _Loss.apply(*results)
        del results
        # A module in tiles runs again. Its graph must not reach the hooks with which the model's forward is recorded.
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor):
            measurement.backward(loss)
    saved.note_survivors()
    return saved


def _results(call: RepeatedCall, leaves: _Leaves) -> list[torch.Tensor]:
    """Run `call`, and return the results from which a backward starts."""
    outputs = tree_leaves(call.run(leaves))
    arguments = set(map(id, leaves.made.values()))
    tensors = {
        id(output): output
        for output in outputs
        if isinstance(output, torch.Tensor) and output.grad_fn is not None and id(output) not in arguments
    }
    return list(tensors.values())[: call.num_results]


class _Loss(torch.autograd.Function):
    """A loss of some tensors that keeps none of them alive, and whose gradients are zeros."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)


def _backward_events(points: Sequence[MemoryPoint], slots: _Slots) -> tuple[BackwardEvent, ...]:
    labels = [point.label[0] for point in points]
    if "backward" not in labels:
        return ()
    start = labels.index("backward")
    nbytes = {value: size for value, size in slots.nbytes.items() if value not in slots.survivors}
    num_slots = {value: sum(slots.values[slot] == value for slot in slots.numbers if slot >= 0) for value in nbytes}
    for number in (point.label[1] for point in points[:start] if point.label[0] == "release"):
        if slots.numbers[number] >= 0:
            value = slots.values[slots.numbers[number]]
            num_slots[value] = num_slots.get(value, 0) - 1
    expected = sum(size for value, size in nbytes.items() if num_slots[value])
    floor = points[start].live_bytes - expected
    events: list[BackwardEvent] = []
    tiled_module: int | None = None
    for point in points[start + 1 :]:
        moment, slot = point.label
        if moment in TILES:
            tiled_module, slot = slot if moment == TILES[0] else None, -1
        elif slots.numbers[slot] < 0:
            if events:
                extra_bytes = max(events[-1].extra_bytes, point.max_bytes - floor - expected)
                events[-1] = replace(events[-1], extra_bytes=extra_bytes)
            continue
        else:
            slot = slots.numbers[slot]
            if moment == "release":
                value = slots.values[slot]
                num_slots[value] = num_slots.get(value, 0) - 1
                expected -= nbytes.get(value, 0) if num_slots[value] == 0 else 0
        events.append(
            BackwardEvent(
                slot=slot,
                release=moment != "unpack",
                entry_bytes=point.live_bytes - floor - expected,
                extra_bytes=point.max_bytes - floor - expected,
                tiled=tiled_module,
            )
        )
    for slot in slots.missing if events else ():
        unpacked = {event.slot: place for place, event in enumerate(events) if not event.release}
        place = 1 + unpacked[min((later for later in unpacked if later > slot), default=events[0].slot)]
        event = events[place - 1]
        events[place:place] = [replace(event, slot=slot, release=release) for release in (False, True)]
    return tuple(events)
