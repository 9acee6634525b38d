"""RunContext: the budget of a run and what its steps have shown, shared by the parts of the controller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from adacc_hf.adapt.budget_warnings import BudgetWarnings
from adacc_hf.adapt.codec_guard import LossGuard
from adacc_hf.adapt.events import Event, MemoryNoted
from adacc_hf.adapt.profile_updates import SwitchedOff
from adacc_hf.artifacts.config import AdaccConfig

RECORDED_STEPS = 2
"""First steps of a policy, in which calls may be recorded. They take longer than later steps, and more memory if no
profile has recorded the model before."""


@dataclass(slots=True)
class RunContext:
    """State that the parts of one run's controller share."""

    config: AdaccConfig
    policy_step: int
    """Finished steps when the policy was set. Tracking steps are counted from here."""
    note: Callable[[Event], None]
    """Function that appends an event to the run's history."""
    guard: LossGuard
    tightened: float | int | None = None
    """Budget of new policies after a step ran out of memory; None before."""
    missing_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes that a measured step took beyond its profile, by moment of the step."""
    counted_elements: int = 0
    """Elements of the largest micro-batch of the step in `missing_bytes`; 0 before a step was measured."""
    step: int = 0
    """Number of the current step, counted from 1."""
    extra_ms: float = 0.0
    """Time in ms by which steps with tracking, solving, measuring or profiling took longer than normal steps."""
    must_measure: bool = False
    """True if the memory of a step is to be measured as soon as possible, once after each change of the policy."""
    measure_after: int = 0
    """Step after which memory may be measured."""
    _pause: int = 0
    warnings: BudgetWarnings = field(init=False)
    """Warnings before micro-batches that may exceed the budget."""

    def __post_init__(self) -> None:
        self.warnings = BudgetWarnings(self.note_memory)

    @property
    def memory_budget(self) -> str | float | int:
        """Budget of new policies: the config's, or less after a step ran out of memory."""
        return self.config.memory_budget if self.tightened is None else self.tightened

    @property
    def switched_off(self) -> frozenset[SwitchedOff]:
        """Codecs that degraded gradients, and are not used any more."""
        return self.guard.switched_off

    def note_memory(self, reason: str) -> None:
        """Append a statement on memory to the history, at the current step."""
        self.note(MemoryNoted(step=self.step, reason=reason))

    def measure_after_steps(self, num_steps: int) -> None:
        """Do not measure the memory of the next `num_steps` steps."""
        self._pause, self.measure_after = 0, self.step + num_steps

    def end_measurement(self, in_vain: bool) -> None:
        """Record that the current step was measured. If it was `in_vain` (without a result), schedule another attempt.

        There is no result under plans without a prediction or next to another profiler. The pause before the next
        attempt then grows: 0, 1, 3, 7, ... steps.
        """
        self.must_measure = in_vain
        self._pause = 2 * self._pause + 1 if in_vain else 0
        self.measure_after = self.step + self._pause // 2
