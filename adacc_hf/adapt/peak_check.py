"""PeakCheck: measures the memory of steps, and corrects the profile if a step took more memory than predicted."""

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
from adacc_hf.price.memory_profile import missing_bytes, with_missing_bytes
from adacc_hf.price.resized_profile import resize_profile
from adacc_hf.run.blocks import Installation
from adacc_hf.torch_glue.batch_shapes import BatchShapes, num_elements, to_profile_shapes
from adacc_hf.torch_glue.distributed import gather_from_all_ranks

PEAK_TOLERANCE = 0.01
"""Fraction by which a measured peak may exceed the predicted peak without a correction of the profile, as long as the
budget is not exceeded. Rounding by allocators, and a few small tensors of the Trainer that are not profiled, stay below
this fraction."""


@dataclass(frozen=True, slots=True)
class _MeasuredStep:
    """Measured peak memory of one rank's step."""

    size_policy: int
    """Index in `PolicyCache.all` of a policy used in the step: the policy with the largest predicted peak."""
    peak_bytes: int
    moments: Mapping[str, int]
    """Measured peak in bytes for each part of the step, such as a block's backward."""
    largest: BatchShapes
    """Sizes of the largest micro-batch."""


class PeakCheck:
    """Measurement of the peak memory of chosen steps, and its comparison with the predicted peak."""

    def __init__(self, choice: PolicyChoice, replanning: Replanning, context: RunContext, num_uncounted: int) -> None:
        self.is_on = False
        """True during a step whose memory is measured."""
        self._choice, self._replanning, self._context = choice, replanning, context
        self._num_uncounted = num_uncounted
        """Number of batches that are on the device before a step begins. A measurement does not include their bytes."""
        self._meter = StepMeter()

    @property
    def counting_ms(self) -> float:
        """Time in ms that beginning and ending the last measurement took."""
        return self._meter.counting_ms

    def start(self, model: nn.Module, optimizer: Any, installation: Installation) -> None:
        """Begin to measure the memory of the current step."""
        self.is_on = True
        is_provisional = any(size_policy.is_provisional for size_policy in self._choice.cache.all)
        self._meter.begin()
        self._meter.count_memory(model, optimizer, installation.functions if is_provisional else None)

    def end_backward(self) -> None:
        """End the measurement. The optimizer's step is not measured, because policies have no effect on its memory."""
        self._meter.end_backward()

    def close(self) -> None:
        """Stop measuring memory. Do nothing if memory is not being measured."""
        self._meter.close()
        self.is_on = False

    def compare(self, step: int) -> bool:
        """Compare the measured peak of `step` with the predicted peak. Return True if a policy changed.

        If the measured peak is higher, increase the predicted memory of the profile. After the first measured step of a
        run, run the solver again.

        Ranks may have measured batches of different sizes.
        """
        size_policies, peaks = self._choice.cache.all, dict[int, int]()
        rank_steps = [measured for measured in gather_from_all_ranks(self._measured_step()) if measured is not None]
        for measured in rank_steps:
            peaks[measured.size_policy] = max(measured.peak_bytes, peaks.get(measured.size_policy, 0))
        self._context.end_measurement(in_vain=not rank_steps)
        moments: dict[str, int] = {}
        for measured in rank_steps:
            moments = {m: max(measured.moments.get(m, 0), moments.get(m, 0)) for m in {**moments, **measured.moments}}
        sizes: BatchShapes = max((measured.largest for measured in rank_steps), key=num_elements, default=())
        has_changed = False
        for place, peak in sorted(peaks.items()):
            size_policy = size_policies[place]
            if size_policy.is_provisional:
                has_changed |= self._settle(step, size_policy, peak, moments, sizes)
            else:
                self._correct(step, size_policy, peak)
        return has_changed

    def _measured_step(self) -> _MeasuredStep | None:
        """Return the measurement of this rank's step, or None if no profile predicts the step's peak."""
        used, peak = self._choice.used(), self._meter.peak_bytes
        comparable = [s for s in used if s is not None and s.num_steps > RECORDED_STEPS]
        if len(comparable) != len(used) or peak is None:
            return None
        # The largest micro-batch of a step has the step's peak.
        largest = max(comparable, key=SizePolicy.predicted_peak_bytes)
        unmeasured_bytes = self._num_uncounted * self._choice.batch_bytes
        return _MeasuredStep(
            size_policy=self._choice.cache.all.index(largest),
            peak_bytes=peak + unmeasured_bytes,
            moments={moment: nbytes + unmeasured_bytes for moment, nbytes in self._meter.moments.items()},
            largest=self._choice.largest,
        )

    def _settle(
        self, step: int, size_policy: SizePolicy, peak: int, moments: Mapping[str, int], largest: BatchShapes
    ) -> bool:
        """Replace the provisional policies (`is_provisional`) after the first measurement of a step. Return True if a
        policy changed.

        `peak` is the measured peak under `size_policy`, and `moments` contains the measured peak in each part of the
        step, such as a block's backward. `largest` are the sizes of the largest micro-batch of all ranks.
        """
        replanner, before = size_policy.replanner, size_policy.replanner.policy
        predicted = size_policy.predicted_peak_bytes()
        size_policy.measured_peak_bytes, size_policy.must_measure, size_policy.is_provisional = peak, False, False
        step_profile = self._profile_at(replanner.profile, largest)
        current = current_policy(step_profile, before)  # tracking may have priced other outlier channels
        context = self._context
        context.missing_bytes = missing_bytes(step_profile, current, moments)
        context.counted_elements = num_elements(largest)
        above = max(context.missing_bytes.values(), default=0)
        context.note(MemoryNoted(step=step, measured_peak_bytes=peak, peak_bytes=predicted, corrected=above > 0))
        reason = f"the memory of a whole step was measured: up to {above} bytes above the profile"
        provisional = [other for other in self._choice.cache.all if other.is_provisional]
        has_changed = False
        for settled in (size_policy, *provisional):
            settled.is_provisional = False
            profile = with_missing_bytes(settled.replanner.profile, context.missing_bytes)
            has_changed |= self._replanning.solve_now(step, settled, profile, reason)
        return has_changed

    def _profile_at(self, profile: Profile, largest: BatchShapes) -> Profile:
        """Return `profile` as predicted for a batch of the sizes `largest`, or `profile` itself if no prediction is
        possible."""
        if self._choice.cache.class_of(largest) is None:
            return profile
        measured = self._choice.cache.size_model()[0].replanner.profile
        names = {name for name, _ in measured.measured[0][0]}
        return resize_profile(measured, tuple(size for size in to_profile_shapes(largest) if size[0] in names))

    def _correct(self, step: int, size_policy: SizePolicy, peak: int) -> None:
        """Increase the predicted memory, and start the solver, if the measured `peak` exceeds the predicted peak."""
        predicted = size_policy.predicted_peak_bytes()
        size_policy.measured_peak_bytes, size_policy.must_measure = peak, False
        is_above = peak > predicted * (1 + PEAK_TOLERANCE) or (
            peak > predicted and size_policy.replanner.is_over_budget(peak)
        )
        self._context.note(MemoryNoted(step=step, measured_peak_bytes=peak, peak_bytes=predicted, corrected=is_above))
        if is_above:
            size_policy.replanner.add_memory(peak - predicted)
            self._choice.check_budget()
            self._replanning.start(step, size_policy)
