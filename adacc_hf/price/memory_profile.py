"""The memory of one measured step, divided into the blocks' stored tensors and everything else.

Every block is recomputed in the measured step. Memory other than the blocks' stored tensors does not depend on the
policy, so the simulator can add the stored tensors of any policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, takewhile
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from adacc_hf.artifacts.kind_profile import BackwardEvent, ForwardEvent, KindProfile
from adacc_hf.artifacts.memory_simulator import simulate_policy
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.price.kind_profile_builder import saved_bytes, with_untrusted_memory
from adacc_hf.price.measurement import Measurement
from adacc_hf.price.model_recording import ModelRecording
from adacc_hf.price.shared_storage import RecordedBlock
from adacc_hf.run.blocks import BlockCall
from adacc_hf.torch_glue.distributed import gradients_of
from adacc_hf.torch_glue.memory import distinct_bytes
from adacc_hf.torch_glue.meters import MemoryMeter, MemoryPoint
from adacc_hf.torch_glue.private import tree_leaves


@dataclass(frozen=True, kw_only=True)
class StepLayout:
    """The memory of the measured step without the blocks' stored tensors, in bytes relative to the step's start."""

    bases: dict[str, int]
    """Live bytes at the start of each block's backward, without the tensors that blocks stored."""
    forward_bases: dict[str, int]
    """Live bytes at the start of each block's forward, without the tensors that blocks stored."""
    forward_peaks: dict[str, int]
    """Peak in the forward of each block, above the live bytes at its start."""
    rest_peaks: dict[str, int]
    """Peak from the end of a block's forward to the next block, above the live bytes at the former's start."""
    outside_stored_bytes: int
    """Live bytes at the start of backward, without the tensors that blocks stored."""
    outside_peak_bytes: int
    loss_peak_bytes: int
    tail_peak_bytes: int
    """Peak before the first block runs, for example in a teacher's forward, or after the backward of all blocks."""
    peaks: dict[str, int]
    """Peak in each block's backward, without the tensors that it and earlier blocks stored."""


def kinds_in_step(recording: ModelRecording, step: StepLayout) -> list[KindProfile]:
    """Return the kinds of `recording` so that each needs at least the memory measured in `step`, in its last call. A
    block alone may need less, because it exchanges no gradients, for example."""
    watched = {block.kind: block for block in recording.blocks}.values()
    return [_with_step(recording, kind, block, step) for kind, block in zip(recording.kinds, watched, strict=True)]


def _with_step(recording: ModelRecording, kind: KindProfile, block: RecordedBlock, step: StepLayout) -> KindProfile:
    name, peak = block.name, step.peaks.get(block.name)
    if kind.untrusted is not None:
        again_bytes = 0 if block.is_retained else saved_bytes(block, recording.shared_tensors)
        extra_bytes = None if peak is None else max(0, peak - again_bytes)
        # The first forward was recorded. The second one, in backward, was measured.
        in_forward = (extra_bytes or 0) + max((value.nbytes for value in kind.values[1:]), default=0)
        in_forward = max(in_forward, step.forward_peaks[name] - kind.generator_bytes)
        return with_untrusted_memory(kind, in_forward, extra_bytes)
    outcome, position = recording.outcome_of(block), recording.positions[name]
    backward_peak = 0 if peak is None else peak + outcome.stored_bytes
    more = max(0, step.forward_peaks[name] - outcome.forward_working_bytes)
    forward = tuple(replace(event, extra_bytes=event.extra_bytes + more) for event in kind.forward)
    if position.precedes_rest:
        stored_bytes = outcome.forward_moments[-1] - kind.forward[-1].extra_bytes
        extra_bytes = step.rest_peaks[name] - stored_bytes
        forward = (*forward, ForwardEvent(value=-1, death=False, extra_bytes=extra_bytes))
    backward, more = kind.backward, max(0, backward_peak - outcome.working_bytes)
    if more and position.follows_rest:  # the backward of the rest runs after this block's
        backward = (*backward, BackwardEvent(slot=-1, release=True, entry_bytes=0, extra_bytes=backward_peak))
    elif more:
        backward = tuple(
            replace(event, entry_bytes=event.entry_bytes + more, extra_bytes=event.extra_bytes + more)
            for event in kind.backward
        )
    return replace(kind, forward=forward, backward=backward)


def gradient_bytes(model: nn.Module) -> int:
    return distinct_bytes(gradients_of(model))


def peak_between(points: Sequence[MemoryPoint], first: tuple[Any, ...], *until: str) -> int:
    """Return the peak from the mark `first`, or 0 without it, to the next mark that begins with one of `until`, or to
    the end."""
    labels = [point.label for point in points]
    if first not in labels:
        return 0
    start = labels.index(first)
    end = next((i for i in range(start + 1, len(points)) if labels[i][0] in until), len(points))
    return max(point.max_bytes for point in points[start:end])


def unwinds(points: Sequence[MemoryPoint]) -> bool:
    """Return True if each backward of a block call in `points` belongs to the latest forward without one."""
    trained, forwards = {point.label[1] for point in points if point.label[0] == "backward"}, list[str]()
    for moment, *names in (point.label for point in points):
        if moment == "enter" and names[0] in trained:
            forwards.append(names[0])
        elif moment == "backward" and (not forwards or forwards.pop() != names[0]):
            return False
    return True


def step_layout(
    points: Sequence[MemoryPoint], kept_bytes: Mapping[str, tuple[int, int]], leftovers: Mapping[str, int]
) -> StepLayout:
    """Return the memory of a step from the `points` of a meter. `kept_bytes` are the bytes that each block stored, in
    the order of the forward, and these without the tensors that live until the end of the forward anyway. `leftovers`
    are the bytes that measuring a block has left until then."""

    def all_of(moment: str) -> Iterator[MemoryPoint]:
        return (point for point in points if point.label[0] == moment)

    names = list(kept_bytes)
    stored_up_to = dict(zip(names, accumulate(stored for stored, _ in kept_bytes.values()), strict=True))
    live = {name: kept_bytes[name][1] + leftovers[name] for name in names}
    live_before = {name: end - live[name] for name, end in zip(names, accumulate(live.values()), strict=True)}
    bases = dict.fromkeys(names, 0)  # a frozen block has no backward
    backwards = {point.label[1]: point.live_bytes for point in all_of("backward")}
    bases |= {name: live_bytes - stored_up_to[name] for name, live_bytes in backwards.items()}
    all_stored = stored_up_to[names[-1]]
    tail = next(all_of("tail"), None)
    enters = {point.label[1]: point.live_bytes for point in all_of("enter")}
    starts = {name: enters[name] + leftovers[name] for name in names}
    before_blocks = max(point.max_bytes for point in takewhile(lambda point: point.label[0] != "enter", points))
    return StepLayout(
        bases=bases,
        forward_bases={name: enters[name] - live_before[name] for name in names},
        forward_peaks={name: peak_between(points, ("enter", name), "leave") - starts[name] for name in names},
        rest_peaks={name: peak_between(points, ("leave", name), "enter") - starts[name] for name in names[:-1]},
        outside_stored_bytes=next(all_of("loss")).live_bytes - all_stored,
        outside_peak_bytes=peak_between(points, ("leave", names[-1]), "loss") - sum(live.values()),
        loss_peak_bytes=peak_between(points, ("loss",), "backward") - all_stored,
        tail_peak_bytes=max(before_blocks, 0 if tail is None else peak_between(points, tail.label)),
        peaks={
            name: peak_between(points, ("backward", name), "backward", "tail") - bases[name] - stored_up_to[name]
            for name in backwards
        },
    )


# Peaks in each part of a step of the run, for allocations that profiling does not see.
#
# DeepSpeed's engine fills gradient buckets during backward, and steps its optimizer at backward's end. Neither depends
# on the policy. Bytes that one step takes above its prediction therefore occur under other policies too.

FORWARD, HEAD_AND_LOSS, AFTER, OPTIMIZER = "forward", "head and loss", "before or after the blocks", "optimizer"
"""Names of the parts of a training step outside the blocks' backward. The backward of a block is a part too, with the
name of the block call. The backward of the head and loss belongs to HEAD_AND_LOSS."""


class CallMarks:
    """Marks in a meter when forward of each call of a model's blocks begins and ends, and when backward starts.

    The mark "tail" separates the blocks' backward from that of modules before them. It belongs to the first call of a
    forward whose result requires a gradient. `before_backward` is called before a mark of a backward.
    """

    def __init__(
        self, meter: MemoryMeter, measurement: Measurement, before_backward: Callable[[], None] | None = None
    ) -> None:
        self._meter, self._measurement, self._before_backward = meter, measurement, before_backward
        self._has_trained = False

    def run(self, name: str, call: Callable[[], Any], args: tuple[Any, ...], is_first: bool) -> Any:
        """Return the result of `call()`, the call `name` of a block with `args`, the first of a forward if
        `is_first`."""
        self._has_trained &= not is_first
        self._meter.mark(("enter", name))
        result = call()
        self._meter.mark(("leave", name))
        if self._mark_gradient(result, ("backward", name)):
            if not self._has_trained:  # blocks before this one are frozen, and modules between may be trained
                self._mark_gradient(args, ("tail", name))
            self._has_trained = True
        return result

    def _mark_gradient(self, tree: Any, label: tuple[str, str]) -> bool:
        """Mark `label` once the gradient of the first tensor in `tree` that has one is complete. Return if there is."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                self._measurement.on_gradient(leaf, lambda: self._mark(label))
                return True
        return False

    def _mark(self, label: tuple[str, str]) -> None:
        if self._before_backward is not None:
            self._before_backward()
        self._meter.mark(label)


@dataclass
class _CallObserver:
    """Observer that marks one block call of each step."""

    call: BlockCall
    marks: CallMarks
    is_first: bool

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = partial(self.call.strategy.run, block, fn, args, kwargs)
        return self.marks.run(self.call.name, run, args, self.is_first)


class StepMarker:
    """Recorder that marks the parts of each training step in `meter` until `remove()`: the blocks' backward, the
    optimizer's step, and the rest. `calls` are the block calls of a step by name."""

    def __init__(self, calls: Mapping[str, BlockCall], meter: MemoryMeter) -> None:
        self._calls, marks = list(calls.values()), CallMarks(meter, Measurement())
        for index, call in enumerate(self._calls):
            call.observer = _CallObserver(call, marks, is_first=index == 0)
        self._hook = register_optimizer_step_pre_hook(lambda *_: meter.mark((OPTIMIZER,)))

    def remove(self) -> None:
        """Stop marking."""
        for call in self._calls:
            call.observer = None
        self._calls = []
        self._hook.remove()


def moment_peaks(points: Sequence[MemoryPoint]) -> dict[str, int]:
    """Return the peak in each part of a training step, over all micro-batches, in bytes above the step's start.

    `points` are the readings of a meter with a `StepMarker`. If an optimizer steps within backward, or runs forward and
    backward itself, its memory counts for the part in which it runs.
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
    """Return the predicted peak in each part of a training step under `policy`, static memory included."""
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
    """Return the bytes by which `measured` exceeds the predicted peak, for each part of a step in which it does."""
    predicted = predicted_peaks(profile, policy)
    excess = {moment: peak - predicted.get(moment, 0) for moment, peak in measured.items()}
    return {moment: nbytes for moment, nbytes in excess.items() if nbytes > 0}


def with_missing_bytes(profile: Profile, missing: Mapping[str, int]) -> Profile:
    """Return a copy of `profile` with `missing` more live bytes in each part of the training step."""
    at_blocks = [missing.get(block.name, 0) for block in profile.blocks]
    return replace(
        profile.with_extra_live_bytes(
            missing.get(FORWARD, 0), missing.get(HEAD_AND_LOSS, 0), at_blocks, missing.get(AFTER, 0)
        ),
        optimizer_peak_bytes=profile.optimizer_peak_bytes + missing.get(OPTIMIZER, 0),
    )
