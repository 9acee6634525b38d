"""Times and peaks of training steps, and a micro-batch that runs out of memory tried again."""

from __future__ import annotations

import gc
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from adacc_hf.adapt.replanner import Replanner
from adacc_hf.artifacts.config import Budget
from adacc_hf.artifacts.errors import ProfilerAtWorkError, as_sentence
from adacc_hf.price.memory_profile import CountedStep, peaks_of
from adacc_hf.run.blocks import BlockFunction, LaterCall
from adacc_hf.torch_glue.memory import MemoryMeter, is_out_of_memory, static_bytes
from adacc_hf.torch_glue.private import is_profiling, version_of
from adacc_hf.torch_glue.rng_state import RandomStates, gpus_in_use
from adacc_hf.torch_glue.tensors import has_gradient_hooks


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
            started, memory, marks = time.perf_counter(), self._memory, self._marks
            self.close()
            if memory.points:
                self.peak_bytes = self.static_bytes + memory.peak_bytes
                if marks is not None:
                    self.moments = {m: self.static_bytes + peak for m, peak in peaks_of(memory.points).items()}
            self.counting_ms += (time.perf_counter() - started) * 1e3

    def end(self) -> None:
        if self._started is not None:
            self.step_ms = (time.perf_counter() - self._started) * 1e3

    def close(self) -> None:
        """Stop counting. Harmless when nothing is counted."""
        if self._memory is not None:
            with suppress(ProfilerAtWorkError):  # started within the step, which was not counted then
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


# A micro-batch that runs out of memory: free, plan tighter, try once more.

log = logging.getLogger(__name__)


TIGHTER = 0.9
"""Share of its memory that a policy may have after it ran out of memory."""


def tighter_budget(replanner: Replanner) -> int | float:
    """A budget of the same form, a tenth below what the policy in force keeps to."""
    budget = Budget.resolve(replanner.memory_budget, replanner.profile, replanner.config)
    if budget.of_peak:
        return int(TIGHTER * min(budget.nbytes, replanner.policy.predicted_peak_bytes))
    stored = min(budget.nbytes, replanner.policy.predicted_stored_bytes)
    return math.floor(1e6 * TIGHTER * stored / replanner.profile.plain_stored_bytes) / 1e6


def advice(replanner: Replanner) -> str:
    """What to set so that a step under the policy of `replanner` fits."""
    needed = replanner.policy.predicted_peak_bytes
    return (
        f"Adacc planned a peak of {needed} bytes for memory_budget={replanner.memory_budget!r}: set "
        f"memory_budget={int(needed * TIGHTER)} or less, or use a smaller batch or shorter sequences"
    )


class GradientsBefore:
    """The gradients of a model before a micro-batch; nothing is copied and nothing synchronises."""

    def __init__(self, model: nn.Module) -> None:
        self._before = [
            (parameter, parameter.grad, None if parameter.grad is None else version_of(parameter.grad))
            for parameter in model.parameters()
            if parameter.requires_grad
        ]

    def restore(self) -> str | None:
        """Take away what a broken backward left; returns why that cannot be done, or None."""
        for parameter, gradient, version in self._before:
            if gradient is not None and version_of(gradient) != version:
                return "earlier micro-batches' gradients are half changed"
            if has_gradient_hooks(parameter):
                return "hooks have used some of its gradients (DeepSpeed, an optimizer that steps inside backward)"
        for parameter, gradient, _ in self._before:
            parameter.grad = gradient
        return None


def run_with_retry(
    run: Callable[[], Any], model: nn.Module, tighten: Callable[[], str | None], advice: Callable[[], str]
) -> Any:
    """What `run` returns, tried once more if it runs out of memory, with the random numbers of the first try.

    `tighten` frees what it can and lowers what the next attempt needs; it returns why it cannot, or None. Raises
    torch.OutOfMemoryError with `advice` if the first attempt cannot be repeated or the second one fails too.
    """
    before = GradientsBefore(model)
    random_states = RandomStates(gpus_in_use())  # some 45 microseconds
    try:
        return run()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        message = str(error)
    # Outside the except clause: the error's traceback holds the frames whose tensors are to be freed.
    gc.collect()
    obstacle = before.restore() or tighten()
    if obstacle is not None:
        raise torch.OutOfMemoryError(f"{as_sentence(message)} {advice()}. The step was not tried again: {obstacle}")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    random_states.restore()
    log.warning("Adacc: out of memory (%s); trying the step again under a tighter policy", message.splitlines()[0])
    try:
        return run()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise torch.OutOfMemoryError(f"{as_sentence(error)} {advice()}. The step failed twice") from None
