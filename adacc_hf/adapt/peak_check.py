"""PeakCheck: measures the memory of steps, and corrects the run's predictions if a step took more than predicted."""

from __future__ import annotations

from typing import Any

from torch import nn

from adacc_hf.adapt.events import MemoryNoted
from adacc_hf.adapt.policy_choice import PolicyChoice
from adacc_hf.adapt.policy_selection import current_policy
from adacc_hf.adapt.run_context import RECORDED_STEPS, RunContext
from adacc_hf.adapt.size_policy import SizePolicy
from adacc_hf.adapt.step_timer import StepMeter
from adacc_hf.artifacts.profile import Profile
from adacc_hf.price.memory_profile import missing_bytes
from adacc_hf.run.blocks import Installation
from adacc_hf.torch_glue.batch_shapes import num_elements

PEAK_TOLERANCE = 0.01
"""Fraction by which a later measured peak may exceed the predicted peak without a correction, as long as the budget is
not exceeded. Rounding by allocators, and a few small tensors of the Trainer, stay below this fraction."""


class PeakCheck:
    """Measurement of the peak memory of chosen steps of this rank, and its comparison with the predicted peak.

    `num_uncounted` is the number of batches that are on the device before a step begins. A measurement does not include
    their bytes.
    """

    def __init__(self, choice: PolicyChoice, context: RunContext, num_uncounted: int) -> None:
        self.is_on = False
        """True during a step whose memory is measured."""
        self._choice, self._context, self._num_uncounted = choice, context, num_uncounted
        self._meter = StepMeter()

    @property
    def counting_ms(self) -> float:
        """Time in ms that beginning and ending the last measurement took."""
        return self._meter.counting_ms

    def start(self, model: nn.Module, optimizer: Any, installation: Installation) -> None:
        """Begin to measure the memory of the current step."""
        self.is_on = True
        self._meter.begin()
        self._meter.count_memory(model, optimizer, installation.functions)

    def end_backward(self) -> None:
        """End the measurement. The optimizer's step is not measured, because policies have no effect on its memory."""
        self._meter.end_backward()

    def close(self) -> None:
        """Stop measuring memory. Do nothing if memory is not being measured."""
        self._meter.close()
        self.is_on = False

    def compare(self, step: int) -> None:
        """Compare the measured peak of `step` with the predicted peak. If it is higher, correct the run's predictions,
        and replace the policy if it then exceeds the budget."""
        record, context = self._measured_record(), self._context
        context.end_measurement(in_vain=record is None)
        if record is None or self._meter.peak_bytes is None:
            return
        unmeasured_bytes = self._num_uncounted * self._choice.batch_bytes
        peak = self._meter.peak_bytes + unmeasured_bytes
        moments = {moment: nbytes + unmeasured_bytes for moment, nbytes in self._meter.moments.items()}
        predicted = record.policy.predicted_peak_bytes
        record.measured_peak_bytes, record.must_measure = peak, False
        profile = self._step_profile(record)
        excess = missing_bytes(profile, current_policy(profile, record.policy), moments)
        budget = context.budget(record.profile)
        is_above = peak > predicted * (1 + PEAK_TOLERANCE) or (
            peak > predicted and budget.limits_peak and peak > budget.nbytes
        )
        is_corrected = bool(excess) and (is_above or context.is_provisional)
        context.note(MemoryNoted(step=step, measured_peak_bytes=peak, peak_bytes=predicted, corrected=is_corrected))
        if is_corrected:
            above = max(excess.values())
            reason = f"a measured step took up to {above} bytes more than predicted"
            context.corrections.add_missing(excess, num_elements(self._choice.largest), reason)
        context.is_provisional = False
        self._choice.refresh(record)

    def _measured_record(self) -> SizePolicy | None:
        """Return the record whose policy has the largest predicted peak of the step, or None if no profile predicts the
        step's peak."""
        used = [record for record in self._choice.used() if record is not None and record.num_steps > RECORDED_STEPS]
        if len(used) != len(self._choice.used()) or self._meter.peak_bytes is None:
            return None
        return max(used, key=lambda record: record.policy.predicted_peak_bytes)

    def _step_profile(self, record: SizePolicy) -> Profile:
        """Return the profile of the step's largest batch, which may be smaller than the bounds of its class."""
        largest = self._choice.largest
        if self._choice.fit.class_of(largest) is None:
            return record.profile
        names = {shape.name for shape in record.shapes or ()}
        sizes = tuple(shape for shape in largest if shape.name in names)
        return self._context.corrections.applied(self._choice.fit.predicted(sizes), sizes)
