"""The memory of one measured or counted step, taken apart: what belongs to the blocks' stores, and what does not.

What is live besides stored tensors does not depend on the policy, so the simulator can put any policy's stores on
top. One forward that stores nothing tells when forward itself lets go of each value. One forward and backward under
full recomputation for each kind of block, in which the last of it retains everything, tells when backward asks for each
saved tensor and lets go of it, and what gradients and temporaries take meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from adacc_hf.artifacts.block_walk import BlockOutcome
from adacc_hf.artifacts.memory_simulator import simulate_policy
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import BackwardEvent, ForwardEvent, KindProfile, Profile, Shared
from adacc_hf.price.measurement import Measurement
from adacc_hf.price.memory_probes import MarkCalls, WatchForward, WatchSlots
from adacc_hf.run.blocks import BlockFunction, Installation, LaterCall
from adacc_hf.tape.tape import Source
from adacc_hf.torch_glue.memory import MemoryMeter, MemoryPoint, collecting_no_garbage, distinct_bytes, forward_loss

NoSync = Callable[[], AbstractContextManager[Any]]
"""What the micro-batches before a step's last one run in, so that ranks exchange gradients once."""


@dataclass(frozen=True, kw_only=True)
class ForwardLayout:
    """The memory of a forward that stored nothing, in bytes relative to its start."""

    first_peak_bytes: int
    """The most that was live before the first block: in the forward of a teacher, say."""
    bases: dict[str, int]
    """What was live when each block started."""
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
    ms: float
    """Milliseconds that it took."""
    peaks: dict[str, int]
    """The most live in each block's backward, besides its and earlier blocks' stores; of blocks that have one."""

    @staticmethod
    def merged(layouts: Mapping[tuple[str, ...], StepLayout]) -> StepLayout:
        """One layout of those of steps, by the names of the blocks that were watched in each."""
        first = next(iter(layouts.values()))  # later steps may stand on what those before them have left
        events = {name: events for layout in layouts.values() for name, events in layout.events.items()}
        own = {name: layout.peaks[name] for names, layout in layouts.items() for name in names if name in layout.peaks}
        return replace(first, events=events, peaks={**first.peaks, **own})


def measure_forward(
    model: nn.Module,
    batch: Mapping[str, Any],
    installation: Installation,
    kinds: Mapping[str, KindProfile],
    sources: Mapping[str, Sequence[Source]],
    shared: Sequence[Shared],
    watched: Mapping[str, bool],
    measurement: Measurement,
) -> ForwardLayout:
    """Run one forward that stores nothing. `sources` has what of `shared` each block would keep for replay.

    Of the calls in `watched` those that are True own what the rest of the model does between them and the next one.
    """
    held: list[torch.Tensor | None] = []
    last = list(installation.functions)[-1]
    installation.begin_step()
    with collecting_no_garbage(), measurement.meter(next(model.parameters()).device) as meter:
        for name, function in installation.functions.items():
            function.strategy = WatchForward(name, kinds[name], meter, sources[name], held, shared, name == last)
        meter.mark(("begin",))
        forward_loss(model, batch)
    begin = next(i for i, point in enumerate(meter.points) if point.label[0] == "enter")
    end = next(i for i, point in enumerate(meter.points) if point.label == ("leave", -1, last))
    bases = {point.label[2]: point.live_bytes for point in meter.points if point.label[0] == "enter"}
    return ForwardLayout(
        first_peak_bytes=max(point.max_bytes for point in meter.points[:begin]),
        bases=bases,
        outside_peak_bytes=max(point.max_bytes for point in meter.points[end:]),
        events={name: _forward_events(meter.points, name, owns) for name, owns in watched.items()},
    )


def _forward_events(points: Sequence[MemoryPoint], name: str, owns: bool) -> tuple[ForwardEvent, ...]:
    """The forward of a call, up to the next one's if it owns what the rest of the model does until then.

    Where another call's value dies meanwhile, that is only one more moment.
    """
    begin, leave = (
        next(i for i, point in enumerate(points) if point.label == (moment, -1, name)) for moment in ("enter", "leave")
    )
    end = next(i for i, point in enumerate(points) if i > leave and point.label[0] == "enter") if owns else leave
    floor = points[begin].live_bytes
    stretch = [(point, point.label[2] == name) for point in points[begin:end]]
    return tuple(
        ForwardEvent(
            value=point.label[1] if is_own else -1,
            death=is_own and point.label[0] == "death",
            extra_bytes=point.max_bytes - floor,
        )
        for point, is_own in stretch
    )


def measure_step_layout(
    model: nn.Module,
    batch: Mapping[str, Any],
    installation: Installation,
    watchers: Sequence[WatchSlots],
    recomputed: Mapping[str, BlockOutcome],
    measurement: Measurement,
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
        with collecting_no_garbage(), measurement.meter(device) as meter, (no_sync or nullcontext)():
            measurement.backward(forward_loss(model, batch))
            meter.mark(("end",))
        earlier_bytes = meter.points[-1].live_bytes
        installation.begin_step()
    functions = installation.functions
    strategies = {name: function.strategy for name, function in functions.items()}
    with collecting_no_garbage(), measurement.meter(device) as meter:
        for index, (name, function) in enumerate(functions.items()):
            function.strategy = MarkCalls(name, strategies[name], meter, measurement, is_first=index == 0)
        for watcher in watchers:
            watcher.meter = meter
        begin = measurement.seconds_at(device)
        loss = forward_loss(model, batch)
        meter.mark(("loss",))
        measurement.backward(loss)
        ms = 1e3 * (measurement.seconds_at(device) - begin)
        loss_bytes = loss.untyped_storage().nbytes()
        del loss
        trained = tuple(parameter for parameter in model.parameters() if parameter.grad is not None)
        gradient_bytes = distinct_bytes(p.grad for p in trained if p.grad is not None)
        model.zero_grad(set_to_none=True)
    for name, function in functions.items():
        function.strategy = strategies[name]
    for watcher in watchers:
        watcher.meter = None
    stored = {name: outcome.stored_bytes for name, outcome in recomputed.items()}
    held = {name: outcome.live_bytes for name, outcome in recomputed.items()}
    stored |= {watcher.name: watcher.stored_bytes for watcher in watchers}
    held |= {watcher.name: watcher.stored_bytes - watcher.cached_bytes for watcher in watchers}
    reading = _Reading(meter.points, list(functions), watchers, stored, held)
    return reading.layout(loss_bytes, gradient_bytes, earlier_bytes, trained, ms)


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
        self, loss_bytes: int, gradient_bytes: int, earlier_bytes: int, trained: tuple[nn.Parameter, ...], ms: float
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
            ms=ms,
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


# What a step of the run takes at each of its moments, where profiling does not see all that is allocated in it.
#
# DeepSpeed's engine fills buckets of gradients while backward runs and steps its optimizer at the end of it. None of
# that depends on the policy: what one step took more than predicted, another policy's steps take too.

FORWARD, AFTER, OPTIMIZER = "forward, head and loss", "before or after the blocks", "optimizer"
"""Moments of a step besides the blocks' backwards, which go by their calls' names."""


class CountedStep:
    """Marks the moments of a step in `meter`, until `remove()`; `functions` are those of an installation."""

    def __init__(self, functions: Mapping[str, BlockFunction | LaterCall], meter: MemoryMeter) -> None:
        self._marked = []
        for index, (name, function) in enumerate(functions.items()):
            marking = MarkCalls(name, function.strategy, meter, Measurement(), is_first=index == 0)
            self._marked.append((function, marking))
            function.strategy = marking
        self._hook = register_optimizer_step_pre_hook(lambda *_: meter.mark((OPTIMIZER,)))

    def remove(self) -> None:
        """Let blocks run unmarked, if they have no other strategy since. Harmless when called again."""
        for function, marking in self._marked:
            if function.strategy is marking:
                function.strategy = marking.inner
        self._marked = []
        self._hook.remove()


def peaks_of(points: Sequence[MemoryPoint]) -> dict[str, int]:
    """Most bytes at each moment of a step that was marked, relative to its start; of all its micro-batches.

    An optimizer that steps before the last backward, parameter by parameter, is part of the block's moment.
    """
    last = max((i for i, point in enumerate(points) if point.label[0] in ("backward", "tail")), default=-1)
    moment, peaks = FORWARD, dict[str, int]()
    for i, point in enumerate(points):
        kind = point.label[0]
        if kind == "backward":
            moment = point.label[1]
        elif kind == "tail":
            moment = AFTER
        elif kind != OPTIMIZER:
            moment = FORWARD
        elif i > last:
            moment = OPTIMIZER
        peaks[moment] = max(point.max_bytes, peaks.get(moment, 0))
    return peaks


def predicted_peaks(profile: Profile, policy: Policy) -> dict[str, int]:
    """The same, as predicted for `policy`, and with what is live before the step."""
    names = {f"backward {block.name}": block.name for block in profile.blocks}
    names |= {moment: moment for moment in (AFTER, OPTIMIZER)}
    peaks: dict[str, int] = {}
    for label, live in simulate_policy(profile, policy).timeline:
        moment = names.get(label, FORWARD)
        peaks[moment] = max(live, peaks.get(moment, 0))
    return peaks


def missing_bytes(profile: Profile, policy: Policy, measured: Mapping[str, int]) -> dict[str, int]:
    """By how much a step under `policy` took more than predicted, at each moment where it did."""
    predicted = predicted_peaks(profile, policy)
    more = {moment: peak - predicted.get(moment, 0) for moment, peak in measured.items()}
    return {moment: nbytes for moment, nbytes in more.items() if nbytes > 0}


def with_missing(profile: Profile, missing: Mapping[str, int]) -> Profile:
    """`profile` with so much more live at each moment."""
    at_blocks = [missing.get(block.name, 0) for block in profile.blocks]
    return replace(
        profile.with_more_live(missing.get(FORWARD, 0), at_blocks, missing.get(AFTER, 0)),
        optimizer_peak_bytes=profile.optimizer_peak_bytes + missing.get(OPTIMIZER, 0),
    )
