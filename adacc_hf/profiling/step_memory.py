"""The memory of one measured step, taken apart: what belongs to the blocks' stores, and what does not.

What is live besides stored tensors does not depend on the policy, so the simulator can put any policy's stores on
top. One forward that stores nothing tells when forward itself lets go of each value. One forward and backward under
full recomputation, in which the last block of each kind retains everything, tells when backward asks for each saved
tensor and lets go of it, and what gradients and temporaries take meanwhile.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from adacc_hf.blocks import Installation, Strategy
from adacc_hf.memory import MemoryMeter, MemoryPoint, collecting_no_garbage, distinct_bytes, forward_loss
from adacc_hf.profile import BackwardEvent, ForwardEvent, KindProfile, Shared
from adacc_hf.profiling.instruments import Instruments
from adacc_hf.simulator import BlockOutcome
from adacc_hf.tapes.call_inputs import find_external
from adacc_hf.tapes.local_tensors import local_of
from adacc_hf.tapes.tape import Source

NoSync = Callable[[], AbstractContextManager[Any]]
"""What the micro-batches before a step's last one run in, so that ranks exchange gradients once."""


class TrackedTensor:
    """A packed object that tells when autograd lets go of it."""

    __slots__ = ("beside", "mark", "slot", "tensor")

    def __init__(self, slot: int, tensor: torch.Tensor, beside: Any, mark: Callable[[Any], None]) -> None:
        self.slot = slot
        self.tensor: torch.Tensor | None = tensor
        self.beside = beside
        """What lives as long as any slot of the block."""
        self.mark = mark

    def __del__(self) -> None:
        self.tensor = self.beside = None
        self.mark(("release", self.slot))


class WatchSlots:
    """The strategy that retains everything and marks every unpack and release.

    It holds the shared inputs that a replay would read, `held`, as other blocks of its kind do.
    """

    def __init__(self, name: str, kind: KindProfile, held: Sequence[Source]) -> None:
        self.name = name
        self.kind = kind
        self.held = held
        self.meter: MemoryMeter | None = None

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        slots = iter(range(len(self.kind.slots)))
        held = [find_external(source, block, args, kwargs) for source in self.held]

        @torch.compiler.disable  # inside a compiled submodule dynamo would trace the hooks too
        def pack(tensor: torch.Tensor) -> TrackedTensor:
            return TrackedTensor(next(slots), tensor.detach(), held, self._mark)

        @torch.compiler.disable
        def unpack(packed: TrackedTensor) -> torch.Tensor:
            self._mark(("unpack", packed.slot))
            return packed.tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return fn(*args)

    @property
    def stored_bytes(self) -> int:
        """Bytes it keeps: every activation that autograd saves."""
        return sum(value.nbytes for value in self.kind.activations if value.saved)

    @property
    def cached_bytes(self) -> int:
        """Bytes of what it keeps that forward holds anyway until the whole forward ends."""
        return sum(value.nbytes for value in self.kind.activations if value.saved and value.cached)

    def _mark(self, event: tuple[str, int]) -> None:
        if self.meter is not None:
            self.meter.mark((*event, self.name))


class WatchForward:
    """The strategy that stores nothing and marks when a value is saved first and when forward lets go of it.

    The shared inputs that a replay would read, at `sources`, go into `held`: replaying blocks keep them, and outlive
    their other readers. The last block empties `held` at its end. No backward can follow. With `meter` None it only
    drops.
    """

    def __init__(
        self,
        name: str,
        kind: KindProfile,
        meter: MemoryMeter | None,
        sources: Sequence[Source],
        held: list[torch.Tensor],
        shared: Sequence[Shared],
        is_last: bool,
    ) -> None:
        self.name = name
        self.kind = kind
        counted = {index for index, record in enumerate(shared) if record.nbytes}
        self.shared = {value.index for value in kind.values if value.shared in counted}
        """Values that count apart from what blocks store."""
        self.sources = sources
        self.held = held
        self.is_last = is_last
        self.meter = meter

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = iter(self.kind.slots if self.kind.fallback is None else ())
        seen: set[int] = set()

        @torch.compiler.disable  # as in WatchSlots
        def pack(tensor: torch.Tensor) -> torch.Tensor | None:
            value = next(values, None)
            if value == -1 or value in self.shared:
                # Held by others, or dead soon, or counted apart: it lives as long as it does under any policy.
                return tensor.detach()
            if self.meter is not None and value is not None and value not in seen:
                seen.add(value)
                self._mark(("pack", value))
                storage = local_of(tensor).untyped_storage()
                weakref.finalize(storage, self._mark, ("death", value), storage.nbytes()).atexit = False
            return None

        with torch.autograd.graph.saved_tensors_hooks(pack, _no_backward):
            self._mark(("enter", -1))
            self.held += [find_external(source, block, args, kwargs) for source in self.sources]
            result = fn(*args)
        if self.is_last:
            self.held.clear()
        self._mark(("leave", -1))
        return result

    def _mark(self, event: tuple[str, int], dying_bytes: int = 0) -> None:
        if self.meter is not None:
            self.meter.mark((*event, self.name), dying_bytes)


def _no_backward(_: Any) -> torch.Tensor:
    raise AssertionError("a forward that stores nothing has no backward")


class MarkCalls:
    """A strategy around another: marks when a block's forward ends and when its backward starts."""

    def __init__(
        self, name: str, inner: Strategy, meter: MemoryMeter, instruments: Instruments, is_first: bool
    ) -> None:
        self.name = name
        self.inner = inner
        self.meter = meter
        self.instruments = instruments
        self.is_first = is_first

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = self.inner.run(block, fn, args, kwargs)
        self.meter.mark(("leave", self.name))
        self._mark_gradient(result, ("backward", self.name))
        if self.is_first:
            self._mark_gradient(args, ("tail", self.name))
        return result

    def _mark_gradient(self, tree: Any, label: tuple[str, str]) -> None:
        """Mark when the gradient of the first differentiable tensor in `tree` is there."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                self.instruments.on_gradient(leaf, lambda: self.meter.mark(label))
                return


@dataclass(frozen=True, kw_only=True)
class ForwardLayout:
    """The memory of a forward that stored nothing, in bytes relative to its start."""

    first_peak_bytes: int
    """The most that was live before the first block: in the forward of a teacher, say."""
    base: int
    """The most that was live when a block started."""
    outside_peak_bytes: int
    """The most that was live after the last block, where no replay held shared inputs any more."""
    events: dict[str, tuple[ForwardEvent, ...]]
    """The forward of each watched block."""


@dataclass(frozen=True, kw_only=True)
class StepLayout:
    """The memory of the measured step besides the blocks' stores, in bytes relative to its start."""

    bases: dict[str, int]
    """What is live besides when each block's backward starts."""
    outside_stored_bytes: int
    """What is live when backward starts, besides the blocks' stores and the loss."""
    outside_peak_bytes: int
    loss_peak_bytes: int
    tail_peak_bytes: int
    gradient_bytes: int
    """All gradients, once backward is over."""
    earlier_bytes: int
    """What an earlier micro-batch left, 0 without one: its gradients, or more where ranks have yet to exchange them."""
    trained: tuple[nn.Parameter, ...]
    """The parameters that got one."""
    events: dict[str, tuple[BackwardEvent, ...]]
    """The backward of each watched block."""
    peaks: dict[str, int]
    """The most live in each block's backward, besides its and earlier blocks' stores; of blocks that have one."""


def measure_forward(
    model: nn.Module,
    batch: Mapping[str, Any],
    installation: Installation,
    kinds: Mapping[str, KindProfile],
    sources: Mapping[str, Sequence[Source]],
    shared: Sequence[Shared],
    watched: Mapping[str, bool],
    instruments: Instruments,
) -> ForwardLayout:
    """Run one forward that stores nothing. `sources` has what of `shared` each block would keep for replay.

    Of the calls in `watched` those that are True own what the rest of the model does between them and the next one.
    """
    held: list[torch.Tensor] = []
    last = list(installation.functions)[-1]
    installation.begin_step()
    with collecting_no_garbage(), instruments.meter(next(model.parameters()).device) as meter:
        for name, function in installation.functions.items():
            function.strategy = WatchForward(name, kinds[name], meter, sources[name], held, shared, name == last)
        meter.mark(("begin",))
        forward_loss(model, batch)
    begin = next(i for i, point in enumerate(meter.points) if point.label[0] == "enter")
    end = next(i for i, point in enumerate(meter.points) if point.label == ("leave", -1, last))
    base = max(point.live_bytes for point in meter.points if point.label[0] == "enter")
    return ForwardLayout(
        first_peak_bytes=max(point.max_bytes for point in meter.points[:begin]),
        base=base,
        outside_peak_bytes=max(point.max_bytes for point in meter.points[end:]),
        events={
            name: _forward_events(meter.points, name) + (_events_after(meter.points, name, base) if owns else ())
            for name, owns in watched.items()
        },
    )


def _forward_events(points: Sequence[MemoryPoint], name: str) -> tuple[ForwardEvent, ...]:
    begin = next(i for i, point in enumerate(points) if point.label == ("enter", -1, name))
    end = next(i for i, point in enumerate(points) if point.label == ("leave", -1, name))
    floor = points[begin].live_bytes
    return tuple(
        ForwardEvent(value=point.label[1], death=point.label[0] == "death", extra_bytes=point.max_bytes - floor)
        for point in points[begin:end]
        if point.label[2] == name
    )


def _events_after(points: Sequence[MemoryPoint], name: str, base: int) -> tuple[ForwardEvent, ...]:
    """What happens between a call and the next one, which begins with `base` bytes live."""
    begin = next(i for i, point in enumerate(points) if point.label == ("leave", -1, name))
    end = next(i for i, point in enumerate(points) if i > begin and point.label[0] == "enter")
    return tuple(
        ForwardEvent(value=point.label[1] if is_death else -1, death=is_death, extra_bytes=point.max_bytes - base)
        for point in points[begin:end]
        for is_death in [point.label[0] == "death" and point.label[2] == name]
    )


def measure_step_layout(
    model: nn.Module,
    batch: Mapping[str, Any],
    installation: Installation,
    watchers: Sequence[WatchSlots],
    recomputed: Mapping[str, BlockOutcome],
    instruments: Instruments,
    accumulates: bool = False,
    no_sync: NoSync | None = None,
) -> StepLayout:
    """Run one forward and backward under the strategies that are installed and take its memory apart.

    `recomputed` is what each block keeps under full recomputation. With `accumulates` it is a later
    micro-batch: an earlier one, run in `no_sync()` if that is given, has left its gradients, which are live before it.
    """
    device = next(model.parameters()).device
    installation.begin_step()
    earlier_bytes = 0
    if accumulates:
        with collecting_no_garbage(), instruments.meter(device) as meter, (no_sync or nullcontext)():
            instruments.backward(forward_loss(model, batch))
            meter.mark(("end",))
        earlier_bytes = meter.points[-1].live_bytes
        installation.begin_step()
    functions = installation.functions
    strategies = {name: function.strategy for name, function in functions.items()}
    with collecting_no_garbage(), instruments.meter(device) as meter:
        for index, (name, function) in enumerate(functions.items()):
            function.strategy = MarkCalls(name, strategies[name], meter, instruments, is_first=index == 0)
        for watcher in watchers:
            watcher.meter = meter
        loss = forward_loss(model, batch)
        meter.mark(("loss",))
        instruments.backward(loss)
        loss_bytes = loss.untyped_storage().nbytes()
        del loss
        trained = tuple(parameter for parameter in model.parameters() if parameter.grad is not None)
        gradient_bytes = distinct_bytes(parameter.grad for parameter in trained)
        model.zero_grad(set_to_none=True)
    for name, function in functions.items():
        function.strategy = strategies[name]
    for watcher in watchers:
        watcher.meter = None
    stored = {name: outcome.stored_bytes for name, outcome in recomputed.items()}
    held = {name: outcome.held_bytes for name, outcome in recomputed.items()}
    stored |= {watcher.name: watcher.stored_bytes for watcher in watchers}
    held |= {watcher.name: watcher.stored_bytes - watcher.cached_bytes for watcher in watchers}
    reading = _Reading(meter.points, list(functions), watchers, stored, held)
    return reading.layout(loss_bytes, gradient_bytes, earlier_bytes, trained)


@dataclass
class _Reading:
    """The points of a measured step, and what each block stored in it."""

    points: Sequence[MemoryPoint]
    names: list[str]
    watchers: Sequence[WatchSlots]
    stored: dict[str, int]
    held: dict[str, int]
    """What of it forward does not hold anyway until the whole forward ends."""

    def layout(
        self, loss_bytes: int, gradient_bytes: int, earlier_bytes: int, trained: tuple[nn.Parameter, ...]
    ) -> StepLayout:
        bases = dict.fromkeys(self.names, 0)  # a frozen block has no backward, and nothing of it is live in one
        backwards = {point.label[1]: point.live_bytes for point in self._all("backward")}
        bases |= {name: live - self._stored_up_to(name) for name, live in backwards.items()}
        loss = next(self._all("loss"))
        all_stored = sum(self.stored.values())
        all_held = sum(self.held.values())
        return StepLayout(
            bases=bases,
            outside_stored_bytes=loss.live_bytes - all_stored - loss_bytes,
            outside_peak_bytes=self._peak(("leave", self.names[-1]), "loss") - all_held,
            loss_peak_bytes=self._peak(("loss",), "backward") - all_stored,
            tail_peak_bytes=self._peak(("tail", self.names[0]), None),
            gradient_bytes=gradient_bytes,
            earlier_bytes=earlier_bytes,
            trained=trained,
            events={watcher.name: self._events(watcher, bases[watcher.name]) for watcher in self.watchers},
            peaks={name: self._backward_peak(name) - bases[name] - self._stored_up_to(name) for name in backwards},
        )

    def _backward_peak(self, name: str) -> int:
        """Most bytes live from the start of a block's backward to the next block's."""
        start = next(i for i, point in enumerate(self.points) if point.label == ("backward", name))
        rest = self.points[start + 1 :]
        end = next((i for i, point in enumerate(rest) if point.label[0] in ("backward", "tail")), len(rest))
        return max(point.max_bytes for point in self.points[start : start + 1 + end])

    def _all(self, moment: str) -> Iterator[MemoryPoint]:
        return (point for point in self.points if point.label[0] == moment)

    def _peak(self, first: tuple[str, ...], until: str | None) -> int:
        """Most bytes live from the mark `first` to the next mark of `until`, or to the end; 0 without such a mark."""
        labels = [point.label for point in self.points]
        if first not in labels:
            return 0
        stretch = self.points[labels.index(first) :]
        end = next((i for i, point in enumerate(stretch) if point.label[0] == until), len(stretch))
        return max(point.max_bytes for point in stretch[:end])

    def _stored_up_to(self, name: str) -> int:
        """What this block and those before it stored."""
        return sum(self.stored[n] for n in self.names[: self.names.index(name) + 1])

    def _events(self, watcher: WatchSlots, base: int) -> tuple[BackwardEvent, ...]:
        floor = base + self._stored_up_to(watcher.name) - watcher.stored_bytes
        alive = _SlotCount(watcher.kind)
        events = []
        in_backward = self.points[self.points.index(next(self._all("loss"))) :]
        for point in in_backward:  # dead slots were released in forward
            if point.label[0] not in ("unpack", "release") or point.label[2] != watcher.name:
                continue
            moment, slot, _ = point.label
            if moment == "release":
                alive.release(slot)
            besides = floor + alive.bytes
            events.append(
                BackwardEvent(
                    slot=slot,
                    release=moment == "release",
                    entry_bytes=point.live_bytes - besides,
                    extra_bytes=point.max_bytes - besides,
                )
            )
        return tuple(events)


class _SlotCount:
    """Bytes of a block's activations that some slot still holds."""

    def __init__(self, kind: KindProfile) -> None:
        self._nbytes = {value.index: value.nbytes for value in kind.activations if value.saved}
        self._slots = kind.slots
        self._held: dict[int, int] = {}
        for value in kind.slots:
            self._held[value] = self._held.get(value, 0) + 1
        self.bytes = sum(self._nbytes.values())

    def release(self, slot: int) -> None:
        value = self._slots[slot]
        self._held[value] -= 1
        if self._held[value] == 0:
            self.bytes -= self._nbytes.get(value, 0)
