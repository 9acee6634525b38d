"""PeakCheck: corrects the run's predictions if a step took more memory than predicted. StepMeter: peak of a step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import nn

from adacc_hf.adapt.policy_choice import PolicyChoice, SizePolicy
from adacc_hf.adapt.policy_fit import current_policy, suitable_policy
from adacc_hf.adapt.run_state import RunState
from adacc_hf.artifacts.errors import ProfilerConflictError
from adacc_hf.artifacts.profile import Profile
from adacc_hf.price.memory_profile import StepMarker, missing_bytes, moment_peaks
from adacc_hf.run.blocks import BlockCall
from adacc_hf.run.policy_handle import PolicyHandle
from adacc_hf.torch_glue.batch_shapes import num_elements
from adacc_hf.torch_glue.memory import static_bytes
from adacc_hf.torch_glue.meters import MemoryMeter
from adacc_hf.torch_glue.private import is_profiling

PEAK_TOLERANCE = 0.01
"""Fraction by which a later measured peak may exceed the predicted peak without a correction, as long as the budget is
not exceeded. Rounding by allocators, and a few small tensors of the Trainer, stay below this fraction."""

PAUSE = 16
"""Steps until a step is measured again, after a step whose peak could not be compared. A CPU's meter slows a step."""


class StepMeter:
    """A meter of a training step's peak memory. Call `begin` and, after backward, `end_backward`."""

    def __init__(self) -> None:
        self.peak_bytes: int | None = None
        """Peak memory of the last measured step, without the optimizer's step. None if no step was measured."""
        self.moments: dict[str, int] = {}
        """Peak memory of each part of the step (see `StepMarker`), such as a block's forward. Empty if `begin` was
        called without `calls`."""
        self._marks: StepMarker | None = None
        self._memory: MemoryMeter | None = None
        self.static_bytes = 0
        """Live bytes before the last measured step: parameters, buffers, gradients and optimizer state."""

    def begin(self, model: nn.Module, optimizer: Any, calls: Mapping[str, BlockCall] | None = None) -> None:
        """Begin to measure the memory of the step and, with the block `calls`, of each part of the step. On a CPU, do
        nothing while another profiler is active."""
        device = next(model.parameters()).device
        self.peak_bytes, self.moments = None, {}
        if device.type == "cpu" and is_profiling():
            return
        self.static_bytes = static_bytes(model, {}, optimizer)
        self._memory = MemoryMeter.for_device(device)
        self._memory.__enter__()
        self._memory.mark(("step",))
        if calls is not None:
            self._marks = StepMarker(calls, self._memory)

    def end_backward(self) -> None:
        """End the measurement before the optimizer's step, whose memory policies do not affect. Set the results."""
        if self._memory is not None:
            memory, marks = self._memory, self._marks
            self.close()
            if memory.points:
                self.peak_bytes = self.static_bytes + memory.peak_bytes
                if marks is not None:
                    self.moments = {m: self.static_bytes + peak for m, peak in moment_peaks(memory.points).items()}

    def close(self) -> None:
        """End the measurement of memory without a result. Do nothing if memory is not being measured."""
        if self._memory is not None:
            with suppress(ProfilerConflictError):  # another profiler was started within the step: no result
                self._memory.__exit__(None, None, None)
        if self._marks is not None:
            self._marks.remove()
        self._memory = self._marks = None


class PeakCheck:
    """Measurement of the peak memory of chosen steps of this rank, and its comparison with the predicted peak."""

    def __init__(self, choice: PolicyChoice, run: RunState) -> None:
        self.is_on = False
        """True during a step whose memory is measured."""
        self.meter = StepMeter()
        self._choice, self._run = choice, run
        self._num_uncounted = run.loop.num_before_step(next(run.model.parameters()).device)
        """Number of batches that are on the device before a step begins. A measurement does not include them."""
        self._requested = choice.shown
        """Record that requested the measurement. The step may have batches of other sizes."""
        self.first_step = 0
        """First step that may be measured."""

    def start(self, handle: PolicyHandle) -> None:
        """Begin to measure the memory of the current step."""
        self.is_on, self._requested = True, self._choice.shown
        self.meter.begin(self._run.model, self._run.optimizer, handle.installation.calls)

    def close(self) -> None:
        """Stop measuring memory. Do nothing if memory is not being measured."""
        self.meter.close()
        self.is_on = False

    def compare(self, step: int) -> None:
        """Compare the measured peak of `step` with the predicted one. If it is higher, correct the run's predictions,
        and replace the policy if it then exceeds the budget."""
        run, choice, peak = self._run, self._choice, self.meter.peak_bytes
        used = [record for record in choice.used if record is not None]
        if peak is None or not used or None in choice.used:  # another profiler is active, or torch's checkpoint
            self.first_step = step + PAUSE
            return
        for record in (*used, self._requested):
            record.must_measure = False
        record = max(used, key=lambda record: record.policy.predicted_peak_bytes)
        unmeasured_bytes = self._num_uncounted * choice.batch_bytes + run.profiler.bucket_bytes
        moments = {moment: nbytes + unmeasured_bytes for moment, nbytes in self.meter.moments.items()}
        predicted, budget = record.policy.predicted_peak_bytes, run.budget(record.profile)
        record.measured_peak_bytes = peak = peak + unmeasured_bytes
        profile = self._step_profile(record)
        excess = missing_bytes(profile, current_policy(profile, record.policy), moments)
        is_first = budget.limits_peak and not run.corrections.counted_elements
        is_above_budget = peak > predicted and budget.limits_peak and peak > budget.nbytes
        is_above = peak > predicted * (1 + PEAK_TOLERANCE) or is_above_budget
        is_corrected = bool(excess) and (is_above or is_first)
        run.note("memory", measured_peak_bytes=peak, peak_bytes=predicted, corrected=is_corrected)
        if is_corrected:
            reason = f"a measured step took up to {max(excess.values())} bytes more than predicted"
            run.corrections.add_missing(excess, num_elements(choice.largest), reason)
        choice.refresh(record)

    def _step_profile(self, record: SizePolicy) -> Profile:
        """Return the profile of the step's largest batch, which may be smaller than the bounds of its class."""
        largest = self._choice.largest
        if self._choice.fit.class_of(largest) is None:
            return record.profile
        names = dict(record.shapes or ())
        profile = self._choice.fit.corrected(tuple((name, size) for name, size in largest if name in names))
        # The largest micro-batch may run other operators than the one that `record` is for, as a single sample does.
        return profile if suitable_policy(record.policy, profile, self._run.config) else record.profile
