"""What a step of the run takes at each of its moments, where profiling does not see all that is allocated in it.

DeepSpeed's engine fills buckets of gradients while backward runs and steps its optimizer at the end of it. None of that
depends on the policy: what one step took more than predicted, another policy's steps take too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch.optim.optimizer import register_optimizer_step_pre_hook

from adacc_hf.blocks import BlockFunction, LaterCall
from adacc_hf.memory import MemoryMeter, MemoryPoint
from adacc_hf.policy import Policy
from adacc_hf.profile import Profile
from adacc_hf.profiling.instruments import Instruments
from adacc_hf.profiling.watching import MarkCalls
from adacc_hf.simulator import simulate

FORWARD, AFTER, OPTIMIZER = "forward, head and loss", "before or after the blocks", "optimizer"
"""Moments of a step besides the blocks' backwards, which go by their calls' names."""


class CountedStep:
    """Marks the moments of a step in `meter`, until `remove()`; `functions` are those of an installation."""

    def __init__(self, functions: Mapping[str, BlockFunction | LaterCall], meter: MemoryMeter) -> None:
        self._marked = []
        for index, (name, function) in enumerate(functions.items()):
            marking = MarkCalls(name, function.strategy, meter, Instruments(), is_first=index == 0)
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
    moment, peaks = FORWARD, {}
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
    plans = [policy.plan_of(block.name) for block in profile.blocks]
    peaks: dict[str, int] = {}
    for label, live in simulate(profile.with_head(policy.head), plans).timeline:
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
