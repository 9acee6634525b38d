"""The memory of one measured step, divided into the blocks' stored tensors and everything else.

Memory other than the blocks' stored tensors does not depend on the policy. The simulator can therefore add the stored
tensors of any policy. Two passes are measured. First, one forward that stores nothing shows when forward itself frees
each value. Then, one forward and backward runs in which every block is recomputed, except that the last block of each
kind (blocks that run the same operators) retains everything. This step shows when backward unpacks and frees each saved
tensor, and how much memory gradients and temporaries take at that time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from adacc_hf.artifacts.kind_profile import BackwardEvent, ForwardEvent, KindProfile
from adacc_hf.artifacts.memory_simulator import simulate_policy
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.price.batch_subsampling import Batch
from adacc_hf.price.measurement import Measurement
from adacc_hf.price.memory_probes import CallMarker, ForwardPass, ForwardProbe, LiveStorages, SlotProbe
from adacc_hf.price.model_recording import ModelRecording
from adacc_hf.price.profiled_model import ProfiledModel
from adacc_hf.run.blocks import BlockFunction, LaterCall, Strategy
from adacc_hf.torch_glue.memory import MemoryMeter, MemoryPoint, distinct_bytes, garbage_collection_disabled


@dataclass(frozen=True, kw_only=True)
class ForwardLayout:
    """The memory of a forward that stored nothing, in bytes relative to the forward's start."""

    first_peak_bytes: int
    """Peak before the first block runs, for example in a teacher's forward."""
    bases: dict[str, int]
    """Live bytes at the start of each block's forward, by block call."""
    outside_peak_bytes: int
    """Peak from the end of the last block to the loss. Inputs that several blocks share are kept for replay during the
    pass, but are freed before the last block ends."""
    events: dict[str, tuple[ForwardEvent, ...]]
    """Memory events in the forward of each watched block (the last block of each kind), by block call."""


HEAD = ("head",)
"""Label that a meter gets when the output layer is called."""


@dataclass(frozen=True)
class HeadStart:
    """The memory when the output layer was called, without the tensors that blocks stored."""

    live_bytes: int
    peak_bytes: int
    """Peak from the end of the last block to the call. If the last block was watched, its input may be included, which
    the block need not have saved."""


@dataclass(frozen=True, kw_only=True)
class StepLayout:
    """The memory of the measured step without the blocks' stored tensors, in bytes relative to the step's start."""

    bases: dict[str, int]
    """Live bytes at the start of each block's backward, without the tensors that blocks stored."""
    head_start: HeadStart | None
    """Memory when the output layer was called. None if this call was not marked."""
    outside_stored_bytes: int
    """Live bytes at the start of backward, without the tensors that blocks stored and without the loss."""
    outside_peak_bytes: int
    loss_peak_bytes: int
    tail_start_bytes: int
    """Live bytes after the backward of all blocks. 0 if no operator runs then."""
    tail_peak_bytes: int
    gradient_bytes: int
    """Bytes of all gradients at the end of backward."""
    earlier_bytes: int
    """Bytes that earlier micro-batches of the step left: gradients, and further bytes if ranks have not exchanged the
    gradients yet. 0 if the step consists of one micro-batch."""
    trained: tuple[nn.Parameter, ...]
    """Parameters that have a gradient after the step."""
    events: dict[str, tuple[BackwardEvent, ...]]
    """Memory events in the backward of each watched block (the last block of each kind), by block call."""
    ms: float
    """Milliseconds of the step."""
    peaks: dict[str, int]
    """Peak in the backward of each block, without the tensors that this block and earlier ones stored. Blocks without a
    backward are left out."""

    @staticmethod
    def merged(layouts: Mapping[tuple[str, ...], StepLayout]) -> StepLayout:
        """Merge the layouts of several measured steps into one.

        A step's key contains the names of the step's watched blocks, which retained their activations. The merged
        layout takes each block's events and peak from the step in which the block was watched, and everything else from
        the first step.
        """
        first = next(iter(layouts.values()))  # tensors that earlier steps left may distort later layouts
        events = {name: events for layout in layouts.values() for name, events in layout.events.items()}
        own_peaks = {
            name: layout.peaks[name] for names, layout in layouts.items() for name in names if name in layout.peaks
        }
        return replace(first, events=events, peaks={**first.peaks, **own_peaks})


TILES = ("begin tiles", "end tiles")
"""First parts of the labels that a meter gets when a module begins and when it stops running in tiles (groups of
rows). The second part is the module's index in `Tiling.modules`."""


class HeadObserver(Protocol):
    """Object that measures the memory of the head (output layer and loss) in the same forward as the blocks."""

    def strategy(self, name: str, probe: Strategy, meter: MemoryMeter) -> Strategy:
        """Return the strategy that runs the block call `name` in place of `probe`."""

    def note_head_start(self, replay_storages: LiveStorages) -> None:
        """Handle a call of the output layer. `replay_storages` are the storages of `ForwardPass`'s replay inputs."""

    def run_backward(self, loss: torch.Tensor, replay_storages: LiveStorages) -> None:
        """Run the backward from `loss`, while memory is measured."""

    def note(self, points: Sequence[MemoryPoint]) -> None:
        """Take the readings of the meter."""


def measure_forward(
    profiled: ProfiledModel, batch: Batch, recording: ModelRecording, observer: HeadObserver | None = None
) -> ForwardLayout:
    """Run one forward of `batch` in which blocks store nothing, and return the measured memory by block.

    If `observer` is given, it also measures the memory of the head.
    """
    installation = profiled.installation
    last_name = list(installation.functions)[-1]
    installation.begin_step()
    with (
        garbage_collection_disabled(),
        profiled.measurement.meter(profiled.device) as meter,
        ExitStack() as stack,
    ):
        forward_pass = ForwardPass(meter, recording.shared, last_name)

        @torch.compiler.disable  # inside a compiled model, Dynamo would trace the mark
        def mark_head() -> None:
            meter.mark(HEAD)
            if observer is not None:
                observer.note_head_start(forward_pass.replay_storages)

        stack.enter_context(profiled.heads.calling(mark_head))
        for name, function in installation.functions.items():
            sources = recording.replay_sources[name]
            probe = ForwardProbe(name, recording.kind_of(name), sources, forward_pass)
            function.strategy = probe if observer is None else observer.strategy(name, probe, meter)
        meter.mark(("begin",))
        loss = profiled.forward_loss(batch)
        meter.mark(("loss",))
        if observer is not None:
            observer.run_backward(loss, forward_pass.replay_storages)
        del loss
    if observer is not None:
        observer.note(meter.points)
    first_enter = next(i for i, point in enumerate(meter.points) if point.label[0] == "enter")
    last_leave = next(i for i, point in enumerate(meter.points) if point.label == ("leave", -1, last_name))
    bases = {point.label[2]: point.live_bytes for point in meter.points if point.label[0] == "enter"}
    return ForwardLayout(
        first_peak_bytes=max(point.max_bytes for point in meter.points[:first_enter]),
        bases=bases,
        outside_peak_bytes=peak_between(meter.points, meter.points[last_leave].label, "loss"),
        events={
            name: _forward_events(meter.points, name, name in recording.calls_before_rest)
            for name in recording.watched_names
        },
    )


def _forward_events(points: Sequence[MemoryPoint], name: str, owns_rest: bool) -> tuple[ForwardEvent, ...]:
    """Return the memory events in the forward of the block call `name`.

    `points` are the measurements of the whole model's forward. If `owns_rest`, the events between this call and the
    next are included. The field `value` of an event is -1 if another call caused the event, for example by freeing a
    tensor.
    """
    begin, leave = (
        next(i for i, point in enumerate(points) if point.label == (moment, -1, name)) for moment in ("enter", "leave")
    )
    end = next(i for i, point in enumerate(points) if i > leave and point.label[0] == "enter") if owns_rest else leave
    base_bytes = points[begin].live_bytes
    events = []
    tiled_module: int | None = None
    for point in points[begin:end]:
        moment, index, call_name = (*point.label, -1, None) if point.label == HEAD else point.label
        is_own, is_tile = call_name == name, moment in TILES
        if is_own and is_tile:
            tiled_module = index if moment == TILES[0] else None
        events.append(
            ForwardEvent(
                value=index if is_own and not is_tile else -1,
                death=is_own and moment == "death",
                extra_bytes=point.max_bytes - base_bytes,
                tiled=tiled_module,
            )
        )
    return tuple(events)


def measure_step(
    profiled: ProfiledModel, batch: Batch, recording: ModelRecording, watched_names: Collection[str] = ()
) -> StepLayout:
    """Run one forward and backward in which every block is recomputed, and return the measured memory by block.

    The block calls in `watched_names` are not recomputed, but retain all saved tensors, and a `SlotProbe` records when
    these tensors are freed. If the step accumulates gradients, gradients of an earlier micro-batch must be live during
    the measurement. If an earlier measurement has not produced these gradients, another micro-batch runs first.
    """
    measurement, device, model = profiled.measurement, profiled.device, profiled.model
    functions = profiled.installation.functions
    probes = recording.set_full_recompute_strategies(functions, watched_names)
    profiled.installation.begin_step()
    accumulates, no_sync = profiled.step.gradient_accumulation_steps > 1, profiled.step.no_sync
    leaves_gradients = accumulates and no_sync is None  # with `no_sync`, gradients of later micro-batches are sharded
    earlier_bytes = _gradient_bytes(model) if leaves_gradients else 0
    if accumulates and not earlier_bytes:
        with garbage_collection_disabled(), measurement.meter(device) as meter, (no_sync or nullcontext)():
            measurement.backward(profiled.forward_loss(batch))
            meter.mark(("end",))
        earlier_bytes = meter.points[-1].live_bytes
        profiled.installation.begin_step()
    strategies = {name: function.strategy for name, function in functions.items()}
    with (
        garbage_collection_disabled(),
        measurement.meter(device) as meter,
        profiled.heads.calling(lambda: meter.mark(HEAD)),
    ):
        trained_calls: set[str] = set()
        for index, (name, function) in enumerate(functions.items()):
            function.strategy = CallMarker(
                name, strategies[name], meter, measurement, is_first=index == 0, trained_calls=trained_calls
            )
        for probe in probes:
            probe.meter = meter
        begin_seconds = measurement.seconds_at(device)
        loss = profiled.forward_loss(batch)
        meter.mark(("loss",))
        measurement.backward(loss)
        ms = 1e3 * (measurement.seconds_at(device) - begin_seconds)
        loss_bytes = loss.untyped_storage().nbytes()
        del loss
        trained = tuple(parameter for parameter in model.parameters() if parameter.grad is not None)
        gradient_bytes = _gradient_bytes(model)
        if not leaves_gradients:
            model.zero_grad(set_to_none=True)
    for name, function in functions.items():
        function.strategy = strategies[name]
    for probe in probes:
        probe.meter = None
    outcomes = {block.name: recording.outcomes[block.kind] for block in recording.blocks}
    stored = {name: outcome.stored_bytes for name, outcome in outcomes.items()}
    live = {name: outcome.live_bytes for name, outcome in outcomes.items()}
    stored |= {probe.name: probe.stored_bytes for probe in probes}
    live |= {probe.name: probe.stored_bytes - probe.cached_bytes for probe in probes}
    readings = _StepReadings(meter.points, list(functions), probes, stored, live)
    return readings.layout(loss_bytes, gradient_bytes, earlier_bytes, trained, ms)


def _gradient_bytes(model: nn.Module) -> int:
    return distinct_bytes(parameter.grad for parameter in model.parameters() if parameter.grad is not None)


def head_point(points: Sequence[MemoryPoint], last_end: tuple[str, ...]) -> MemoryPoint | None:
    """Return the first call of the output layer after the mark labelled `last_end`, or None if no call was marked."""
    start = next(i for i, point in enumerate(points) if point.label == last_end)
    return next((point for point in points[start:] if point.label == HEAD), None)


def peak_between(points: Sequence[MemoryPoint], first: tuple[Any, ...], until: str | None) -> int:
    """Return the peak from the mark labelled `first` to the next mark whose label begins with `until`, or to the end.

    Return 0 if there is no mark `first`.
    """
    labels = [point.label for point in points]
    if first not in labels:
        return 0
    segment = points[labels.index(first) :]
    end = next((i for i, point in enumerate(segment) if point.label[0] == until), len(segment))
    return max(point.max_bytes for point in segment[:end])


@dataclass
class _StepReadings:
    """Readings of a memory meter in a measured step, and the bytes that each block stored in the step."""

    points: Sequence[MemoryPoint]
    names: list[str]
    probes: Sequence[SlotProbe]
    stored: dict[str, int]
    live: dict[str, int]
    """Stored bytes by block, without the tensors that live until the end of the forward under any policy."""

    def layout(
        self, loss_bytes: int, gradient_bytes: int, earlier_bytes: int, trained: tuple[nn.Parameter, ...], ms: float
    ) -> StepLayout:
        bases = dict.fromkeys(self.names, 0)  # a frozen block has no backward
        backwards = {point.label[1]: point.live_bytes for point in self._all("backward")}
        bases |= {name: live - self._stored_up_to(name) for name, live in backwards.items()}
        loss = next(self._all("loss"))
        all_stored = sum(self.stored.values())
        all_live = sum(self.live.values())
        last_end = ("leave", self.names[-1])
        head = head_point(self.points, last_end)
        tail = next(self._all("tail"), None)
        before_bytes = peak_between(self.points, last_end, HEAD[0]) - all_live
        return StepLayout(
            bases=bases,
            head_start=None if head is None else HeadStart(head.live_bytes - all_live, before_bytes),
            outside_stored_bytes=loss.live_bytes - all_stored - loss_bytes,
            outside_peak_bytes=peak_between(self.points, last_end, "loss") - all_live,
            loss_peak_bytes=peak_between(self.points, ("loss",), "backward") - all_stored,
            tail_start_bytes=0 if tail is None else tail.live_bytes,
            tail_peak_bytes=0 if tail is None else peak_between(self.points, tail.label, None),
            gradient_bytes=gradient_bytes,
            earlier_bytes=earlier_bytes,
            trained=trained,
            events={probe.name: self._events(probe, bases[probe.name]) for probe in self.probes},
            ms=ms,
            peaks={name: self._backward_peak(name) - bases[name] - self._stored_up_to(name) for name in backwards},
        )

    def _backward_peak(self, name: str) -> int:
        """Return the peak from the start of the backward of block `name` to the start of the next block's backward."""
        start = next(i for i, point in enumerate(self.points) if point.label == ("backward", name))
        later_points = self.points[start + 1 :]
        end = next(
            (i for i, point in enumerate(later_points) if point.label[0] in ("backward", "tail")), len(later_points)
        )
        return max(point.max_bytes for point in self.points[start : start + 1 + end])

    def _all(self, moment: str) -> Iterator[MemoryPoint]:
        return (point for point in self.points if point.label[0] == moment)

    def _stored_up_to(self, name: str) -> int:
        return sum(self.stored[n] for n in self.names[: self.names.index(name) + 1])

    def _events(self, probe: SlotProbe, base: int) -> tuple[BackwardEvent, ...]:
        floor = base + self._stored_up_to(probe.name) - probe.stored_bytes
        live_slots = _LiveSlots(probe.kind)
        events = []
        in_backward = self.points[self.points.index(next(self._all("loss"))) :]
        tiled_module: int | None = None
        for point in in_backward:  # dead slots were released in forward
            if point.label[0] not in ("unpack", "release", *TILES) or point.label[2] != probe.name:
                continue
            moment, slot, _ = point.label
            if moment in TILES:
                tiled_module, slot = slot if moment == TILES[0] else None, -1
            if moment == "release":
                live_slots.release(slot)
            expected_bytes = floor + live_slots.bytes
            events.append(
                BackwardEvent(
                    slot=slot,
                    release=moment != "unpack",
                    entry_bytes=point.live_bytes - expected_bytes,
                    extra_bytes=point.max_bytes - expected_bytes,
                    tiled=tiled_module,
                )
            )
        return tuple(events)


class _LiveSlots:
    """Counter of those activation bytes of a block that autograd still holds. `release` subtracts an activation once
    all of its saved tensors are freed."""

    def __init__(self, kind: KindProfile) -> None:
        self._nbytes = {value.index: value.nbytes for value in kind.activations if value.saved}
        self._slots = kind.slots
        self._num_slots: dict[int, int] = {}
        for value in kind.slots:
            self._num_slots[value] = self._num_slots.get(value, 0) + 1
        self.bytes = sum(self._nbytes.values())

    def release(self, slot: int) -> None:
        value = self._slots[slot]
        self._num_slots[value] -= 1
        if self._num_slots[value] == 0:
            self.bytes -= self._nbytes.get(value, 0)


# Peaks in each part of a step of the run, for allocations that profiling does not see.
#
# DeepSpeed's engine fills gradient buckets during backward, and steps its optimizer at backward's end. Neither depends
# on the policy. Bytes that one step takes above its prediction therefore occur under other policies too.

FORWARD, HEAD_AND_LOSS, AFTER, OPTIMIZER = "forward", "head and loss", "before or after the blocks", "optimizer"
"""Names of the parts of a training step outside the blocks' backward. The backward of a block is a part too, with the
name of the block call. The backward of the head and loss belongs to HEAD_AND_LOSS."""


class StepMarker:
    """Recorder that marks the parts of each training step in `meter` until `remove()` is called.

    The parts are the blocks' backward, the optimizer's step, and the rest. `functions` contains, by the name of each
    block call, the object that runs this call.
    """

    def __init__(self, functions: Mapping[str, BlockFunction | LaterCall], meter: MemoryMeter) -> None:
        self._markers = []
        trained_calls: set[str] = set()
        for index, (name, function) in enumerate(functions.items()):
            marker = CallMarker(
                name, function.strategy, meter, Measurement(), is_first=index == 0, trained_calls=trained_calls
            )
            self._markers.append((function, marker))
            function.strategy = marker
        self._hook = register_optimizer_step_pre_hook(lambda *_: meter.mark((OPTIMIZER,)))

    def remove(self) -> None:
        """Stop marking training steps. Restore each block's earlier strategy, unless other code has set a new one
        since.

        Further calls have no effect.
        """
        for function, marker in self._markers:
            if function.strategy is marker:
                function.strategy = marker.inner
        self._markers = []
        self._hook.remove()


def moment_peaks(points: Sequence[MemoryPoint]) -> dict[str, int]:
    """Return the peak in each part of a training step (such as a block's backward), over all micro-batches.

    Peaks are in bytes above the step's start. `points` are the readings of a meter with a `StepMarker`. If an optimizer
    updates each parameter during backward, or runs forward and backward itself (`optimizer.step(closure)`), the
    optimizer's memory counts for the part of the step in which the update runs.
    """
    of_blocks = ("leave", "backward", "tail")
    last_block = max((i for i, point in enumerate(points) if point.label[0] in of_blocks), default=-1)
    moment, peaks = FORWARD, dict[str, int]()
    for i, point in enumerate(points):
        kind = point.label[0]
        if kind == "backward":
            moment = point.label[1]
        elif kind == "tail":
            moment = AFTER
        elif kind == "leave" and (i + 1 == len(points) or points[i + 1].label[0] == "backward"):
            moment = HEAD_AND_LOSS
        elif kind != OPTIMIZER:
            moment = FORWARD
        elif i > last_block:
            moment = OPTIMIZER
        peaks[moment] = max(point.max_bytes, peaks.get(moment, 0))
    return peaks


def predicted_peaks(profile: Profile, policy: Policy) -> dict[str, int]:
    """Return the predicted peak in each part of a training step (such as a block's backward) under `policy`.

    Static memory is included.
    """
    names = {f"backward {block.name}": block.name for block in profile.blocks}
    names |= {
        HEAD_AND_LOSS: HEAD_AND_LOSS,
        f"backward of {HEAD_AND_LOSS}": HEAD_AND_LOSS,
        AFTER: AFTER,
        OPTIMIZER: OPTIMIZER,
    }
    peaks: dict[str, int] = {}
    for label, live in simulate_policy(profile, policy).timeline:
        moment = names.get(label, FORWARD)
        peaks[moment] = max(live, peaks.get(moment, 0))
    return peaks


def missing_bytes(profile: Profile, policy: Policy, measured: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes by which the `measured` peak exceeds the peak predicted for `policy`, for each part of a
    training step.

    Parts in which the measured peak is not higher are left out.
    """
    predicted = predicted_peaks(profile, policy)
    excess = {moment: peak - predicted.get(moment, 0) for moment, peak in measured.items()}
    return {moment: nbytes for moment, nbytes in excess.items() if nbytes > 0}


def with_missing_bytes(profile: Profile, missing: Mapping[str, int]) -> Profile:
    """Return a copy of `profile` in which the live bytes of each part of the training step are larger by the bytes in
    `missing`."""
    at_blocks = [missing.get(block.name, 0) for block in profile.blocks]
    return replace(
        profile.with_extra_live_bytes(
            missing.get(FORWARD, 0), missing.get(HEAD_AND_LOSS, 0), at_blocks, missing.get(AFTER, 0)
        ),
        optimizer_peak_bytes=profile.optimizer_peak_bytes + missing.get(OPTIMIZER, 0),
    )
