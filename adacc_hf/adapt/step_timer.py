"""StepMeter: peak memory of a step. StepTimes: times of the steps at one batch size."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import nn

from adacc_hf.artifacts.errors import ProfilerConflictError
from adacc_hf.price.memory_profile import StepMarker, moment_peaks
from adacc_hf.run.blocks import BlockFunction, LaterCall
from adacc_hf.torch_glue.memory import static_bytes
from adacc_hf.torch_glue.meters import MemoryMeter
from adacc_hf.torch_glue.private import is_profiling


class StepMeter:
    """A meter of a training step's peak memory. Call `begin`, `count_memory` and, after backward, `end_backward`."""

    def __init__(self) -> None:
        self.peak_bytes: int | None = None
        """Peak memory of the last measured step, without the optimizer's step. None if no step was measured."""
        self.counting_ms = 0.0
        """Overhead of the last measurement in ms: the time to begin and to end the measurement."""
        self.moments: dict[str, int] = {}
        """Peak memory of each part of the step (see `StepMarker`), such as a block's forward. Empty if `count_memory`
        was called without `functions`."""
        self._marks: StepMarker | None = None
        self._memory: MemoryMeter | None = None
        self.static_bytes = 0
        """Live bytes before the last measured step: parameters, buffers, gradients and optimizer state."""

    def begin(self) -> None:
        self.peak_bytes = None
        self.moments = {}
        self.counting_ms = 0.0

    def count_memory(
        self, model: nn.Module, optimizer: Any, functions: Mapping[str, BlockFunction | LaterCall] | None = None
    ) -> None:
        """Begin to measure the memory of the step. If `functions` (the block calls) is not None, also measure the peak
        in each part of the step.

        On a CPU, do nothing while another profiler is active.
        """
        device = next(model.parameters()).device
        if device.type == "cpu" and is_profiling():
            return
        started = time.perf_counter()
        self.static_bytes = static_bytes(model, {}, optimizer)
        self._memory = MemoryMeter.for_device(device)
        self._memory.__enter__()
        self._memory.mark(("step",))
        if functions is not None:
            self._marks = StepMarker(functions, self._memory)
        self.counting_ms += (time.perf_counter() - started) * 1e3

    def end_backward(self) -> None:
        """End the measurement, and set the attributes with its results. The optimizer's step is left out, because
        policies do not affect its memory."""
        if self._memory is not None:
            started, memory, marks = time.perf_counter(), self._memory, self._marks
            self.close()
            if memory.points:
                self.peak_bytes = self.static_bytes + memory.peak_bytes
                if marks is not None:
                    self.moments = {m: self.static_bytes + peak for m, peak in moment_peaks(memory.points).items()}
            self.counting_ms += (time.perf_counter() - started) * 1e3

    def close(self) -> None:
        """End the measurement of memory without a result. Do nothing if memory is not being measured."""
        if self._memory is not None:
            with suppress(ProfilerConflictError):  # another profiler was started within the step: no result
                self._memory.__exit__(None, None, None)
        if self._marks is not None:
            self._marks.remove()
        self._memory = self._marks = None


MAX_STEPS = 64
"""Number of latest step times that are kept for a policy. More times would not make their median more accurate."""

COMPARED = 16
"""Number of latest normal steps (steps that only train) from which the normal time of a step is computed. Older steps
are ignored, because a machine's speed drifts."""

ENOUGH = 4
"""Minimum number of normal steps (steps that only train) from which the normal time is computed, because the median of
fewer steps is close to a single step's time."""


class StepTimes:
    """Times of the training steps at one batch size.

    A normal step follows the policy and does no other work. Other steps also track outliers, profile or measure memory.
    The extra time of such a step is its time minus the median time of normal steps.
    """

    def __init__(self) -> None:
        self.ms: list[float] = []
        """Times of normal steps under the current plans, at most MAX_STEPS."""
        self._latest: deque[float] = deque(maxlen=COMPARED)
        """Times of the latest normal steps. Steps under earlier plans are included, because these take nearly the same
        time."""
        self._num_waiting, self._waiting_ms = 0, 0.0
        """Number and total time of the steps with other work whose extra time is not known yet, because fewer than
        ENOUGH normal steps have run. If every step is a tracking step, the extra time stays unknown."""

    @property
    def median_ms(self) -> float | None:
        """Median time of normal steps under the current plans. None before the first normal step."""
        return statistics.median(self.ms) if self.ms else None

    def start_over(self) -> None:
        """Drop the times in `ms`, because later steps run under other plans."""
        self.ms = []

    def add_normal(self, ms: float) -> float:
        """Add the time of a normal step (a step that only trained). Return the extra time in ms of earlier steps for
        which `add_other` had too few normal steps to compare with."""
        self.ms = [*self.ms[1 - MAX_STEPS :], ms]
        self._latest.append(ms)
        return self._extra_ms()

    def add_other(self, ms: float) -> float:
        """Add the time of a step that is not normal, such as a tracking step. Return the step's extra time in ms.

        The extra time is the time above the median of normal steps. Return 0 if there are too few normal steps so far.
        A later `add_normal` then returns the extra time of this step. The extra time is negative if the step was faster
        by chance. Over many steps, these errors cancel out.
        """
        self._num_waiting += 1
        self._waiting_ms += ms
        return self._extra_ms()

    def _extra_ms(self) -> float:
        if len(self._latest) < ENOUGH or not self._num_waiting:
            return 0.0
        extra_ms = self._waiting_ms - self._num_waiting * statistics.median(self._latest)
        self._num_waiting, self._waiting_ms = 0, 0.0
        return extra_ms
