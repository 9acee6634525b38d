"""RunContext: state shared by the objects that control a run, such as the budget and the measured memory of steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from adacc_hf.adapt.budget_warnings import BudgetWarnings
from adacc_hf.adapt.codec_guard import LossGuard
from adacc_hf.adapt.events import Event, MemoryNoted
from adacc_hf.adapt.profile_updates import SwitchedOff
from adacc_hf.artifacts.config import AdaccConfig

RECORDED_STEPS = 2
"""Number of steps after a policy is set in which calls of blocks may be recorded. A step with recordings takes longer
than later steps, and more memory if no profile has recorded the model before."""


@dataclass(slots=True)
class RunContext:
    """State shared by the objects that control one run, such as `AdaptivePhase` and `PolicyChoice`."""

    config: AdaccConfig
    policy_step: int
    """Number of finished steps when the policy was set. Tracking steps are counted from this step."""
    note: Callable[[Event], None]
    """Function that appends an event to the run's history."""
    guard: LossGuard
    tightened: float | int | None = None
    """Smaller budget for new policies, after a step ran out of memory. None if no step has run out of memory."""
    missing_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes by which the measured memory of a step exceeded the profile's prediction, by part of the step, such as a
    block's backward (see `StepMarker`)."""
    counted_elements: int = 0
    """Number of elements in the largest micro-batch of the step whose memory gave `missing_bytes`, or 0 before such a
    step."""
    step: int = 0
    """Number of the current step, counted from 1."""
    extra_ms: float = 0.0
    """Overhead of the controller in ms: extra time of steps with tracking, solving, measuring or profiling."""
    must_measure: bool = False
    """True if the memory of a step is to be measured as soon as possible, once after each change of the policy."""
    measure_after: int = 0
    """Number of the step after which the memory of a step may be measured again."""
    _pause: int = 0
    warnings: BudgetWarnings = field(init=False)
    """Warnings before micro-batches that may exceed the budget."""

    def __post_init__(self) -> None:
        self.warnings = BudgetWarnings(self.note_memory)

    @property
    def memory_budget(self) -> str | float | int:
        """Budget of new policies: the config's budget, or a smaller budget after a step ran out of memory."""
        return self.config.memory_budget if self.tightened is None else self.tightened

    @property
    def switched_off(self) -> frozenset[SwitchedOff]:
        """Codecs that new policies must not use, because these codecs degraded gradients."""
        return self.guard.switched_off

    @property
    def settings(self) -> Hashable:
        """Everything besides the sizes of a batch that a policy for these sizes depends on, and that may change during
        a run: the budget, the switched-off codecs, and the bytes by which
        measured steps exceeded their profiles."""
        return self.memory_budget, self.switched_off, tuple(sorted(self.missing_bytes.items()))

    def note_memory(self, reason: str) -> None:
        """Append an event about memory to the history at the current step. `reason` describes the event."""
        self.note(MemoryNoted(step=self.step, reason=reason))

    def measure_after_steps(self, num_steps: int) -> None:
        """Allow measurements of memory again only after the next `num_steps` steps."""
        self._pause, self.measure_after = 0, self.step + num_steps

    def end_measurement(self, in_vain: bool) -> None:
        """Record that the measurement of the current step's memory has ended.

        If the measurement gave no usable result (`in_vain` is True), schedule another one. The result is not usable if
        no profile predicts the step's memory, or if another profiler was active. The pause before the next attempt
        grows: 0, 1, 3, 7, ... steps.
        """
        self.must_measure = in_vain
        self._pause = 2 * self._pause + 1 if in_vain else 0
        self.measure_after = self.step + self._pause // 2
