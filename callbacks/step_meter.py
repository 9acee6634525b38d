"""Measured time and peak of training steps, without synchronising in normal ones."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from adacc_hf.blocks import BlockFunction, LaterCall
from adacc_hf.memory import MemoryMeter, static_bytes
from adacc_hf.profiling.counted_step import CountedStep, peaks_of


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
        if device.type == "cpu" and torch.autograd.profiler._is_profiler_enabled:
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
