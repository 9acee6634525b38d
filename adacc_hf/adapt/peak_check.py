"""PeakCheck: counts the memory and the time of steps, and corrects prices if a step took more than predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from adacc_hf.adapt.events import MemoryNoted
from adacc_hf.adapt.policy_choice import PolicyChoice
from adacc_hf.adapt.policy_selection import current_policy
from adacc_hf.adapt.replanning import Replanning
from adacc_hf.adapt.run_context import RECORDED_STEPS, RunContext
from adacc_hf.adapt.size_policy import SizePolicy
from adacc_hf.adapt.step_timer import StepMeter
from adacc_hf.artifacts.profile import Profile
from adacc_hf.price.batch_subsampling import resize_profile
from adacc_hf.price.memory_profile import missing_bytes, with_missing_bytes
from adacc_hf.run.blocks import Installation
from adacc_hf.torch_glue.batch_shapes import BatchShapes, num_elements, to_profile_shapes
from adacc_hf.torch_glue.distributed import gather_from_all_ranks

PEAK_TOLERANCE = 0.01
"""Share by which a measured peak may exceed the predicted one before prices are corrected, if the budget is kept.
Allocators round by less, and a few small tensors of the Trainer are not profiled."""


@dataclass(frozen=True, slots=True)
class _CountedStep:
    """Counted peak of one rank's step."""

    size_policy: int
    """Place of the step's largest size policy in the cache."""
    peak_bytes: int
    moments: Mapping[str, int]
    """Peak in bytes by moment of the step."""
    largest: BatchShapes
    """Sizes of the largest micro-batch."""


class PeakCheck:
    """Comparison of counted peaks with predicted ones, and the times of steps."""

    def __init__(self, choice: PolicyChoice, replanning: Replanning, context: RunContext, num_uncounted: int) -> None:
        self.is_on = False
        """True during a step whose memory is counted."""
        self._choice, self._replanning, self._context = choice, replanning, context
        self._num_uncounted = num_uncounted
        """Batches that are live before a step, so that its count leaves them out."""
        self._meter = StepMeter()

    def begin_step(self) -> None:
        """Start the clock."""
        self._meter.begin()

    def count_if_due(self, is_tracking: bool, model: nn.Module, optimizer: Any, installation: Installation) -> None:
        """Count the memory of the step that begins, if its turn has come and no outliers are tracked in it."""
        if self._context.turns.step_begins() and not is_tracking:
            self.is_on = True
            is_provisional = any(size_policy.is_provisional for size_policy in self._choice.cache.all)
            self._meter.count_memory(model, optimizer, installation.functions if is_provisional else None)

    def end_backward(self) -> None:
        """End the count: a policy has no part in the memory of the optimizer's step."""
        self._meter.backward_is_over()

    def end_step(self, is_tracking: bool) -> None:
        """Stop the clock, and count the step for the policies that it used."""
        self._meter.end()
        for size_policy in self._choice.used():
            if size_policy is not None:
                size_policy.num_steps += 1
        self._add_time(is_tracking)

    def _add_time(self, is_tracking: bool) -> None:
        """Add the step's time to those of normal steps, or its time beyond a normal step to the overhead."""
        current, step_ms = self._choice.current, self._meter.step_ms
        if step_ms is None or current is None or not self._choice.ran_alone() or current.num_steps <= RECORDED_STEPS:
            self._context.extra_ms += self._meter.counting_ms
        elif is_tracking or self.is_on or current.is_fresh:
            self._context.extra_ms += current.times.add_other(step_ms)
        else:
            self._context.extra_ms += current.times.add_normal(step_ms)
        if current is not None:
            current.is_fresh = False

    def close(self) -> None:
        """Stop counting. Harmless when no count runs."""
        self._meter.close()
        self.is_on = False

    def compare(self, step: int) -> bool:
        """Correct prices if the counted step took more memory than predicted. Return True if a policy changed.

        Ranks may have counted different sizes.
        """
        size_policies, peaks = self._choice.cache.all, dict[int, int]()
        counted_steps = [counted for counted in gather_from_all_ranks(self._counted_step()) if counted is not None]
        for counted in counted_steps:
            peaks[counted.size_policy] = max(counted.peak_bytes, peaks.get(counted.size_policy, 0))
        self._context.turns.ended(in_vain=not counted_steps)
        moments: dict[str, int] = {}
        for counted in counted_steps:
            moments = {m: max(counted.moments.get(m, 0), moments.get(m, 0)) for m in {**moments, **counted.moments}}
        sizes: BatchShapes = max((counted.largest for counted in counted_steps), key=num_elements, default=())
        has_changed = False
        for place, peak in sorted(peaks.items()):
            size_policy = size_policies[place]
            if size_policy.is_provisional:
                has_changed |= self._settle(step, size_policy, peak, moments, sizes)
            else:
                self._correct(step, size_policy, peak)
        return has_changed

    def _counted_step(self) -> _CountedStep | None:
        """Return this rank's counted step; None if it cannot be compared."""
        used, peak = self._choice.used(), self._meter.peak_bytes
        comparable = [s for s in used if s is not None and s.num_steps > RECORDED_STEPS]
        if len(comparable) != len(used) or peak is None:
            return None
        # The peak of a step is that of its largest micro-batch.
        largest = max(comparable, key=lambda size_policy: size_policy.replanner.predicted_peak_bytes())
        uncounted = self._num_uncounted * self._choice.batch_bytes
        return _CountedStep(
            size_policy=self._choice.cache.all.index(largest),
            peak_bytes=peak + uncounted,
            moments={moment: nbytes + uncounted for moment, nbytes in self._meter.moments.items()},
            largest=self._choice.largest,
        )

    def _settle(
        self, step: int, size_policy: SizePolicy, peak: int, moments: Mapping[str, int], largest: BatchShapes
    ) -> bool:
        """Solve all provisional policies for the memory that the first counted step took. Return True on a change.

        `largest` are the sizes of the largest micro-batch of all ranks in that step.
        """
        replanner, before = size_policy.replanner, size_policy.replanner.policy
        size_policy.measured_peak_bytes, size_policy.must_count, size_policy.is_provisional = peak, False, False
        counted = self._at_counted(replanner.profile, largest)
        current = current_policy(counted, before)  # tracking may have priced other outlier channels
        context = self._context
        context.missing_bytes = missing_bytes(counted, current, moments)
        context.counted_elements = num_elements(largest)
        predicted, above = replanner.predicted_peak_bytes(), max(context.missing_bytes.values(), default=0)
        context.note(MemoryNoted(step=step, measured_peak_bytes=peak, peak_bytes=predicted, corrected=above > 0))
        reason = f"a whole step was counted, which takes up to {above} bytes more than was profiled"
        provisional = [other for other in self._choice.cache.all if other.is_provisional]
        has_changed = False
        for settled in (size_policy, *provisional):
            settled.is_provisional = False
            profile = with_missing_bytes(settled.replanner.profile, context.missing_bytes)
            has_changed |= self._replanning.solve_now(step, settled, profile, reason)
        return has_changed

    def _at_counted(self, profile: Profile, largest: BatchShapes) -> Profile:
        """Return the profile at the sizes `largest` of a counted step, or `profile` if no size model predicts them."""
        if self._choice.cache.class_of(largest) is None:
            return profile
        measured = self._choice.cache.size_model()[0].replanner.profile
        names = {name for name, _ in measured.measured[0][0]}
        return resize_profile(measured, tuple(size for size in to_profile_shapes(largest) if size[0] in names))

    def _correct(self, step: int, size_policy: SizePolicy, peak: int) -> None:
        """Raise the predicted memory of `size_policy` if its counted `peak` is above, and start the solver."""
        predicted = size_policy.replanner.predicted_peak_bytes()
        size_policy.measured_peak_bytes, size_policy.must_count = peak, False
        is_above = peak > predicted * (1 + PEAK_TOLERANCE) or (
            peak > predicted and size_policy.replanner.is_over_budget(peak)
        )
        self._context.note(MemoryNoted(step=step, measured_peak_bytes=peak, peak_bytes=predicted, corrected=is_above))
        if is_above:
            size_policy.replanner.add_memory(peak - predicted)
            self._replanning.start(step, size_policy)
