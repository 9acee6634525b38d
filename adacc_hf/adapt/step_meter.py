"""Times and peaks of training steps, without synchronising in normal ones."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import nn

from adacc_hf.price.step_memory import CountedStep, peaks_of
from adacc_hf.run.blocks import BlockFunction, LaterCall
from adacc_hf.torch_glue.memory import MemoryMeter, static_bytes
from adacc_hf.torch_glue.private import is_profiling


class StepMeter:
    """Times every step by the host's clock, and counts the live bytes of those that it is asked to."""

    def __init__(self) -> None:
        self.peak_bytes: int | None = None
        """Peak of the step that was counted last, until the optimizer ran; None if none was."""
        self.step_ms: float | None = None
        """Time of the last step."""
        self.counting_ms = 0.0
        """Time that starting and ending to count took in the last step; the events between are not in it."""
        self.moments: dict[str, int] = {}
        """The same for each moment of that step, if it was marked."""
        self._started: float | None = None
        self._marks: CountedStep | None = None
        self._memory: MemoryMeter | None = None
        self.static_bytes = 0
        """Live before the step that was counted last: parameters, buffers, gradients and optimizer state."""

    @property
    def is_counting(self) -> bool:
        """Whether the memory of the step that runs is being counted."""
        return self._memory is not None

    def begin(self) -> None:
        self._started = time.perf_counter()
        self.step_ms = self.peak_bytes = None
        self.moments = {}
        self.counting_ms = 0.0

    def count_memory(
        self, model: nn.Module, optimizer: Any, functions: Mapping[str, BlockFunction | LaterCall] | None = None
    ) -> None:
        """Count the live bytes of the step that begins, by its moments if the blocks' `functions` are given.

        Does nothing where another profiler is at work.
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
            self._marks = CountedStep(functions, self._memory)
        self.counting_ms += (time.perf_counter() - started) * 1e3

    def backward_is_over(self) -> None:
        """The optimizer's turn: a policy has no part in its memory."""
        if self._memory is not None:
            started = time.perf_counter()
            self._memory.__exit__(None, None, None)
            self.peak_bytes = self.static_bytes + self._memory.peak_bytes
            if self._marks is not None:
                self._marks.remove()
                self.moments = {m: self.static_bytes + peak for m, peak in peaks_of(self._memory.points).items()}
                self._marks = None
            self._memory = None
            self.counting_ms += (time.perf_counter() - started) * 1e3

    def end(self) -> None:
        if self._started is not None:
            self.step_ms = (time.perf_counter() - self._started) * 1e3

    def close(self) -> None:
        """Stop counting. Harmless when nothing is counted."""
        if self._memory is not None:
            self._memory.__exit__(None, None, None)
        if self._marks is not None:
            self._marks.remove()
        self._memory = self._marks = None


class CountingTurns:
    """Which steps' memory is counted: one after each change of policy, and ever later ones while they count in vain,
    under plans without a prediction or beside a profiler."""

    def __init__(self) -> None:
        self.is_wanted = False
        """Whether a step is to be counted, as soon as may be."""
        self._num_steps = self._from = self._pause = 0

    def wait(self, num_steps: int) -> None:
        """Count none of the next `num_steps`."""
        self._pause, self._from = 0, self._num_steps + num_steps

    def step_begins(self) -> bool:
        """Whether the step that begins is one to be counted."""
        self._num_steps += 1
        return self.is_wanted and self._num_steps > self._from

    def ended(self, in_vain: bool) -> None:
        """A step was counted; if in vain, the next one comes after twice as many."""
        self.is_wanted = in_vain
        self._pause = 2 * self._pause + 1 if in_vain else 0
        self._from = self._num_steps + self._pause // 2


# Times of training steps: of normal ones, and by how much longer the others take.

MAX_STEPS = 64
"""Step times that are kept for a policy; the median of more is no better."""

COMPARED = 16
"""Normal steps that another one is compared with, the latest: a machine's speed drifts."""

ENOUGH = 4
"""Normal steps that are needed for that: the median of fewer is one of them."""


class StepTimes:
    """Of the steps at one size of batch."""

    def __init__(self) -> None:
        self.ms: list[float] = []
        """Normal steps under the present plans."""
        self._latest: deque[float] = deque(maxlen=COMPARED)
        """Normal steps under any plans: another policy moves a step's time by far less than tracking does."""
        self._num_waiting, self._waiting_ms = 0, 0.0
        """Steps that could not be compared so far, and the time of all of them: none ever is where all are tracked."""

    @property
    def median_ms(self) -> float | None:
        """A normal step under the present plans; None if there was none."""
        return statistics.median(self.ms) if self.ms else None

    def start_over(self) -> None:
        """Other plans are followed from now on."""
        self.ms = []

    def add_normal(self, ms: float) -> float:
        """Keep a normal step's time; returns the extra time of earlier steps that can be compared only now."""
        self.ms = [*self.ms[1 - MAX_STEPS :], ms]
        self._latest.append(ms)
        return self._extra_ms()

    def add_other(self, ms: float) -> float:
        """By how much a step that was not normal took longer; 0 for now if too few normal ones are known.

        Below 0 if it was faster by chance: of many steps these are as many as were slower by chance.
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
