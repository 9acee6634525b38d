"""SizePolicy: the policy of a run for one batch size, with its measurements. StepTimes: times of its steps."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from adacc_hf.artifacts.size_model import Shapes

if TYPE_CHECKING:
    from adacc_hf.artifacts.policy import Policy
    from adacc_hf.artifacts.profile import Profile
    from adacc_hf.run.policy_handle import BlockPlans

RECORDED_STEPS = 2
"""Number of steps after a policy is set in which calls of blocks may be recorded. A step with recordings takes longer
than later steps, and more memory if no profile has recorded the model before."""
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


@dataclass(slots=True)
class SizePolicy:
    """Record of a run for one size class: the profile and the policy of its batches, and measurements of its steps."""

    shapes: Shapes | None
    """Sizes of the batch that the policy was made for, or None if unknown."""
    base: Profile
    """Profile for these sizes, recorded or predicted from other sizes."""
    profile: Profile
    """`base` with the run's corrections (`Corrections.applied`)."""
    policy: Policy
    plans: BlockPlans
    version: int
    """Version of the corrections in `profile`."""
    num_waiting: int = 0
    """Number of batches under a policy that a solver run may improve. 0 if a run would find no faster one."""
    must_measure: bool = True
    """True if the memory of a step has not been measured yet under the current actions."""
    num_steps: int = 0
    times: StepTimes = field(default_factory=StepTimes)
    is_fresh: bool = False
    """True until a first step has run under the current plans. This step is slower, because it prepares the plans."""
    predicted_step_ms: float | None = None
    error: float | None = None
    """Largest round-trip error in the last tracking step."""
    gradient_error: float | None = None
    measured_peak_bytes: int | None = None
