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
from adacc_hf.torch_glue.memory import MemoryMeter, static_bytes
from adacc_hf.torch_glue.private import is_profiling


class StepMeter:
    """A meter of the peak memory of a step, between `begin` and `end_backward`, if `count_memory` is called."""

    def __init__(self) -> None:
        self.peak_bytes: int | None = None
        """Peak memory of the current or last step, without the optimizer's step. None if it was not measured."""
        self.counting_ms = 0.0
        """Time taken in the last step to begin and end the measurement of memory, without the events in between."""
        self.moments: dict[str, int] = {}
        """Peak memory of each moment of the step (see `StepMarker`), if `count_memory` was given the blocks."""
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
        """Measure the memory of the step that begins, also by moments if the blocks' `functions` are given.

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
        """End the measurement of memory before the optimizer's step, whose memory no policy changes."""
        if self._memory is not None:
            started, memory, marks = time.perf_counter(), self._memory, self._marks
            self.close()
            if memory.points:
                self.peak_bytes = self.static_bytes + memory.peak_bytes
                if marks is not None:
                    self.moments = {m: self.static_bytes + peak for m, peak in moment_peaks(memory.points).items()}
            self.counting_ms += (time.perf_counter() - started) * 1e3

    def close(self) -> None:
        """End the measurement of memory without a result. Has no effect if memory is not being measured."""
        if self._memory is not None:
            with suppress(ProfilerConflictError):  # another profiler was started within the step: no result
                self._memory.__exit__(None, None, None)
        if self._marks is not None:
            self._marks.remove()
        self._memory = self._marks = None


MAX_STEPS = 64
"""Step times that are kept for a policy. The median of more is no better."""

COMPARED = 16
"""Latest normal steps with which another step is compared. No more, because a machine's speed drifts."""

ENOUGH = 4
"""Fewest normal steps for a comparison, because the median of fewer is close to a single step's time."""


class StepTimes:
    """Times of the steps at one batch size.

    Normal steps follow the policy and do no other work. The other steps track, profile or measure memory too, and their
    extra time is the difference from the normal ones.
    """

    def __init__(self) -> None:
        self.ms: list[float] = []
        """Times of normal steps under the current plans, at most MAX_STEPS."""
        self._latest: deque[float] = deque(maxlen=COMPARED)
        """Times of normal steps under any plans: a change of policy changes them far less than tracking does."""
        self._num_waiting, self._waiting_ms = 0, 0.0
        """Number and total time of the other steps before there were ENOUGH normal ones. If every step tracks, there
        never are."""

    @property
    def median_ms(self) -> float | None:
        """Median time of normal steps under the current plans. None before the first."""
        return statistics.median(self.ms) if self.ms else None

    def start_over(self) -> None:
        """Begin a new list of normal times, because the plans change."""
        self.ms = []

    def add_normal(self, ms: float) -> float:
        """Add the time of a normal step. Return the extra time of earlier steps that can be compared only now."""
        self.ms = [*self.ms[1 - MAX_STEPS :], ms]
        self._latest.append(ms)
        return self._extra_ms()

    def add_other(self, ms: float) -> float:
        """Add the time of another step. Return its extra time, or 0 for now if there are too few normal steps.

        The extra time is negative if the step was faster by chance. Over many steps, chance cancels out.
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
