"""RunContext: state shared by the objects that control a run, such as the corrections of its predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from adacc_hf.adapt.budget_warnings import BudgetWarnings
from adacc_hf.adapt.codec_guard import LossGuard
from adacc_hf.adapt.corrections import Corrections
from adacc_hf.adapt.events import Event, MemoryNoted
from adacc_hf.artifacts.config import AdaccConfig, Budget
from adacc_hf.artifacts.profile import Profile

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
    corrections: Corrections
    num_micro: int = 1
    """Micro-batches per step that the predictions count."""
    is_provisional: bool = False
    """True if the budget limits the peak, until the memory of a first step has been measured."""
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

    def budget(self, profile: Profile) -> Budget:
        """Return the run's budget in bytes for policies of `profile`."""
        return Budget.resolve(self.corrections.memory_budget, profile, self.config)

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
