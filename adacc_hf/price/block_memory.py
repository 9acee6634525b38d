"""Memory of one block, measured on a recorded call that runs again alone.

A forward that stores nothing shows when forward frees each value. A forward and backward that stores everything shows
when backward unpacks and frees each saved tensor, and the memory of gradients and temporaries.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from adacc_hf.artifacts.kind_profile import BackwardEvent, ForwardEvent
from adacc_hf.artifacts.tiles import Tiling
from adacc_hf.price.codec_selection import is_parameter_cast
from adacc_hf.price.measurement import Measurement
from adacc_hf.tape.tape import Tape
from adacc_hf.tape.tiled_rows import run_in_tiles, run_on_parameters, trainable_parameters, watching_tiles
from adacc_hf.torch_glue.memory import garbage_collection_disabled
from adacc_hf.torch_glue.meters import MemoryMeter, MemoryPoint
from adacc_hf.torch_glue.private import tree_leaves, tree_map
from adacc_hf.torch_glue.tensors import local_of
from adacc_hf.torch_glue.zero3 import saved_tensor, without_gathered_memory

FLAT_PARAMETER = "_flat_param"
"""Name under which FSDP 1 registers all parameters of a block as one. The block reads views of it."""
TILES = ("begin tiles", "end tiles")
"""First parts of a meter's labels where a module begins and stops running in tiles. The second part is its index."""


@dataclass(frozen=True, kw_only=True)
class BlockMemory:
    """Memory events of one block call, in bytes above the live bytes at the start of its forward and backward."""

    forward: tuple[ForwardEvent, ...] = ()
    backward: tuple[BackwardEvent, ...] = ()
    """Empty if no result of the call requires a gradient."""

    def with_more(self, forward_bytes: int, backward_bytes: int) -> BlockMemory:
        """Return a copy with `forward_bytes` more live bytes in forward, and `backward_bytes` more in backward."""
        return BlockMemory(
            forward=tuple(replace(e, extra_bytes=e.extra_bytes + forward_bytes) for e in self.forward),
            backward=tuple(
                replace(e, entry_bytes=e.entry_bytes + backward_bytes, extra_bytes=e.extra_bytes + backward_bytes)
                for e in self.backward
            ),
        )


class RepeatedCall:
    """Call of a block that can run again, on new copies of its parameters, which share their memory."""

    def __init__(self, run: Callable[[_Leaves], Any], num_results: int, overwrites: bool) -> None:
        self._run = run
        self._num_results = num_results
        self._overwrites = overwrites
        self._leaves: _Leaves | None = None
        """Leaves of the latest run, which keep its gradients alive."""

    @staticmethod
    def of_graph(graph: Callable[..., Any], inputs: Sequence[Any], num_results: int, overwrites: bool) -> RepeatedCall:
        """Return a call that runs a traced `graph`, whose first `num_results` results require gradients."""
        return RepeatedCall(lambda leaves: graph(*map(leaves.of, inputs)), num_results, overwrites)

    @staticmethod
    def of_block(
        block: nn.Module,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        tiling: Tiling | None,
        num_results: int,
        overwrites: bool,
        is_forward: bool = False,
    ) -> RepeatedCall:
        """Return a call that runs the block's own code, in tiles if `tiling` is given. If `is_forward`, no backward
        will follow, and the block's own parameters may be read."""

        def run(leaves: _Leaves) -> Any:
            called = fn
            if isinstance(fn, partial):
                called = partial(fn.func, *tree_map(leaves.of, fn.args), **tree_map(leaves.of, fn.keywords))
            parameters, arguments = trainable_parameters(block), tree_map(leaves.of, args)
            if tiling is not None:
                # Backward looks up the parameters of a module in tiles again, so it must find its own.
                torch.clear_autocast_cache()
                leaves.note_gradients(parameters.values())
                return run_in_tiles(block, tiling, called, *arguments)
            if is_forward and not torch.is_autocast_enabled(next(iter(block.parameters()), torch.empty(0)).device.type):
                return called(*arguments)
            with _computed_tensors_as_leaves(block, leaves):
                named = [(name, p) for name, p in parameters.items() if not name.endswith(FLAT_PARAMETER)]
                copies = {name: leaves.of(parameter) for name, parameter in named}
                return run_on_parameters(block, called, copies, arguments)

        return RepeatedCall(run, num_results, overwrites)

    def run(self, has_gradients: bool = False) -> Any:
        """Run the call. If `has_gradients`, the copies of parameters have gradients already."""
        self._leaves = _Leaves(self._overwrites, has_gradients)
        return self._run(self._leaves)

    def free(self) -> None:
        """Free the leaves of the latest run, and their gradients."""
        self._leaves = None

    def results(self, has_gradients: bool) -> list[torch.Tensor]:
        """Run the call, and return the results from which a backward starts."""
        tensors: dict[int, torch.Tensor] = {}
        for leaf in tree_leaves(self.run(has_gradients)):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None and not self._is_argument(leaf):
                tensors.setdefault(id(leaf), leaf)
        return list(tensors.values())[: self._num_results]

    def _is_argument(self, tensor: torch.Tensor) -> bool:
        return self._leaves is not None and any(tensor is leaf for leaf in self._leaves.made.values())


@contextmanager
def _computed_tensors_as_leaves(block: nn.Module, leaves: _Leaves) -> Iterator[None]:
    """Replace tensors with a graph in modules (FSDP's views of gathered parameters) by leaves meanwhile."""
    attributes = [
        (vars(module), name, value)
        for module in block.modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.grad_fn is not None
    ]
    try:
        for namespace, name, value in attributes:
            namespace[name] = leaves.of(value)
        yield
    finally:
        for namespace, name, value in attributes:
            namespace[name] = value


class _Leaves:
    """Leaf tensors with the memory of a call's inputs, for one run of the call."""

    def __init__(self, overwrites: bool, has_gradients: bool) -> None:
        self._overwrites = overwrites
        self._has_gradients = has_gradients
        self.made: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        """Return the leaf for a tensor that requires a gradient (a clone if the call overwrites it), else `value`."""
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
        if self._overwrites and not is_parameter:
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
    """Run the forward of `call` and forward and backward of `graph`, both with the operators of `tape`. Return the
    memory events.

    `dead_slots` are the saved tensors that the forward itself frees. If `has_gradients`, the parameters have gradients
    already.
    """
    device = tape.values[0].device
    with garbage_collection_disabled():
        with measurement.meter(device) as meter:
            _run_forward(call, _Slots(tape, dead_slots, meter))
        forward = _forward_events(meter.points)
        with measurement.meter(device) as meter:
            slots = _Slots(tape, dead_slots, meter)
            _run_backward(graph, slots, measurement, has_gradients)
            survivors = {value for value, storage in slots.storages.items() if not storage.expired()}
    call.free()
    graph.free()
    return BlockMemory(forward=forward, backward=_backward_events(meter.points, slots, survivors))


def measure_by_other_graph(
    graph: RepeatedCall, tape: Tape, dead_slots: frozenset[int], measurement: Measurement, has_gradients: bool
) -> BlockMemory:
    """Return the memory events of a call whose traced `graph` has somewhat other operators than `tape`: those of
    forward are the tape's, those of backward the graph's. Saved tensors are matched in their order."""
    keys: list[Any] = []

    @torch.compiler.disable
    def note(tensor: torch.Tensor) -> None:
        keys.append((tuple(tensor.shape), tensor.dtype))

    with garbage_collection_disabled():
        with torch.autograd.graph.saved_tensors_hooks(note, refuse_backward):
            graph.run()
        matcher = SequenceMatcher(None, [(ref.geometry[0], ref.dtype) for ref in tape.slots], keys, autojunk=False)
        numbers = [-1] * len(keys)
        for on_tape, in_graph, size in matcher.get_matching_blocks():
            numbers[in_graph : in_graph + size] = range(on_tape, on_tape + size)
        with measurement.meter(tape.values[0].device) as meter:
            slots = _Slots(tape, dead_slots, meter, numbers)
            _run_backward(graph, slots, measurement, has_gradients)
            survivors = {value for value, storage in slots.storages.items() if not storage.expired()}
        events = list(_backward_events(meter.points, slots, survivors))
    graph.free()
    for slot in sorted(set(range(len(tape.slots))) - set(numbers) - dead_slots, reverse=True) if events else ():
        unpacked = {event.slot: place for place, event in enumerate(events) if not event.release}
        place = 1 + unpacked[min((later for later in unpacked if later > slot), default=events[0].slot)]
        event = events[place - 1]
        events[place:place] = [replace(event, slot=slot, release=release) for release in (False, True)]
    return BlockMemory(forward=_forward_of_tape(tape, dead_slots), backward=tuple(events))


def _forward_of_tape(tape: Tape, dead_slots: frozenset[int]) -> tuple[ForwardEvent, ...]:
    """Return the events of a forward in which each value lives from its operator to its last reader on the tape."""
    saved = {ref.value for slot, ref in enumerate(tape.slots) if slot not in dead_slots}
    inputs = [value for value in saved if tape.values[value].producer is None]
    events = [ForwardEvent(value=value, death=False, extra_bytes=0) for value in (-1, *inputs)]
    live: dict[int, int] = {}
    device = tape.values[0].device.type
    in_cache = {  # of autocast
        value
        for operator in tape.operators
        for _, value in operator.outputs
        if torch.is_autocast_enabled(device) and operator.short_name == "to_copy" and is_parameter_cast(tape, value)
    }
    for operator in tape.operators:
        computed = [value for _, value in operator.outputs]
        live |= {value: tape.values[value].nbytes for value in computed}
        live |= {new: live.pop(old) for old, new in operator.mutations if old in live}
        events[-1] = replace(events[-1], extra_bytes=max(events[-1].extra_bytes, sum(live.values())))
        events += [ForwardEvent(value=v, death=False, extra_bytes=sum(live.values())) for v in computed if v in saved]
        for value in dict.fromkeys([*operator.inputs(), *computed]):
            last = max(tape.consumers(value), default=len(tape.operators))
            if value in live and value not in in_cache and last == operator.index:
                del live[value]
                if value in saved:
                    events.append(ForwardEvent(value=value, death=True, extra_bytes=sum(live.values())))
    return tuple(events)


class _Slots:
    """Saved tensors of a running call, by the values on its tape."""

    def __init__(
        self, tape: Tape, dead_slots: frozenset[int], meter: MemoryMeter, numbers: Iterable[int] | None = None
    ) -> None:
        self.values = [-1 if tape.is_held_elsewhere(ref.value) else ref.value for ref in tape.slots]
        self.dead = dead_slots
        self.nbytes = {v: tape.values[v].nbytes for v in self.values if v >= 0 and tape.values[v].producer is not None}
        """Bytes of each saved value that the call computes."""
        self.meter = meter
        self.storages: dict[int, StorageWeakRef] = {}
        self._numbers = iter(range(len(tape.slots)) if numbers is None else numbers)

    def next(self, tensor: torch.Tensor) -> tuple[int, int, bool]:
        """Return (slot, or -1 if it is not on the tape, value, True if the value is new) of the next saved tensor."""
        slot = next(self._numbers)
        value = self.values[slot] if slot >= 0 else -1
        is_new = value >= 0 and value not in self.storages
        if is_new:
            self.storages[value] = StorageWeakRef(local_of(tensor).untyped_storage())
        return slot, value, is_new

    def mark_tiles(self, moment: str, module: int) -> None:
        """Mark the begin or the end of a module in tiles."""
        self.meter.mark((f"{moment} tiles", module))


def _run_forward(call: RepeatedCall, slots: _Slots) -> None:
    """Run a forward that stores nothing for backward, and mark when a value is first saved and when it is freed."""
    mark = slots.meter.mark

    @torch.compiler.disable  # inside a compiled submodule, Dynamo would trace the hooks too
    def pack(tensor: torch.Tensor) -> torch.Tensor | None:
        slot, value, is_new = slots.next(tensor)
        if value < 0 or slot in slots.dead:
            return tensor.detach()  # lives equally long under any policy
        if is_new:
            mark(("pack", value))
        if is_new and value in slots.nbytes:
            storage = local_of(tensor).untyped_storage()
            weakref.finalize(storage, mark, ("death", value), storage.nbytes()).atexit = False
        return None

    with torch.autograd.graph.saved_tensors_hooks(pack, refuse_backward), watching_tiles(slots.mark_tiles):
        mark(("enter", -1))
        result = call.run()
    mark(("leave", -1))
    del result


def refuse_backward(_: Any) -> torch.Tensor:
    """Raise ValueError, because the model's own code runs a backward before it returns the loss."""
    raise ValueError(
        "the loss runs a backward of its own before it is returned, within a block or around it (a gradient penalty, "
        "forces as gradients of an energy, or a loss that embeds small batches one by one, such as "
        "CachedMultipleNegativesRankingLoss, which saves the memory already): train without adacc_hf, or with another "
        "loss"
    )


def _forward_events(points: Sequence[MemoryPoint]) -> tuple[ForwardEvent, ...]:
    labels = [point.label[0] for point in points]
    begin, end = labels.index("enter"), labels.index("leave")
    base_bytes, events = points[begin].live_bytes, []
    tiled_module: int | None = None
    for point in points[begin:end]:
        moment, index = point.label
        if moment in TILES:
            tiled_module = index if moment == TILES[0] else None
        events.append(
            ForwardEvent(
                value=-1 if moment in TILES else index,
                death=moment == "death",
                extra_bytes=point.max_bytes - base_bytes,
                tiled=tiled_module,
            )
        )
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


def _run_backward(call: RepeatedCall, slots: _Slots, measurement: Measurement, has_gradients: bool) -> None:
    """Run a forward that stores everything, and its backward, and mark when saved tensors are unpacked and freed."""
    mark = slots.meter.mark

    @torch.compiler.disable
    def pack(tensor: torch.Tensor) -> TrackedTensor:
        slot = slots.next(tensor)[0]
        return TrackedTensor(slot, tensor, mark if slot >= 0 else _ignore)

    @torch.compiler.disable
    def unpack(packed: TrackedTensor) -> torch.Tensor:
        packed.mark(("unpack", packed.slot))
        return saved_tensor(packed.tensor)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack), watching_tiles(slots.mark_tiles):
        results = call.results(has_gradients)
    if results:
        measurement.on_gradient(results[0], partial(mark, ("backward", -1)))
        loss = _Loss.apply(*results)
        del results
        # A module in tiles runs again. Its graph must not reach the hooks with which the model's forward is recorded.
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor):
            measurement.backward(loss)


def _ignore(label: Any) -> None:
    """Mark nothing."""


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


def _backward_events(points: Sequence[MemoryPoint], slots: _Slots, survivors: set[int]) -> tuple[BackwardEvent, ...]:
    """Return the memory events of a backward. `survivors` were alive at its end, in autocast's cache for example."""
    labels = [point.label[0] for point in points]
    if "backward" not in labels:
        return ()
    start = labels.index("backward")
    nbytes = {value: size for value, size in slots.nbytes.items() if value not in survivors}
    num_slots = {value: slots.values.count(value) for value in nbytes}
    for slot in (point.label[1] for point in points[:start] if point.label[0] == "release"):
        num_slots[slots.values[slot]] = num_slots.get(slots.values[slot], 0) - 1
    expected = sum(size for value, size in nbytes.items() if num_slots[value])
    floor = points[start].live_bytes - expected
    events = []
    tiled_module: int | None = None
    for point in points[start + 1 :]:
        moment, slot = point.label
        if moment in TILES:
            tiled_module, slot = slot if moment == TILES[0] else None, -1
        elif moment == "release":
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
    return tuple(events)
