"""SizePolicy: the policy of a run for one batch size, with its state and measurements.

NOTE [States of a size policy]
| state | meaning | ends with |
|---|---|---|
| `is_provisional` | the policy needs little memory, because no step was measured yet | the first measured step |
| `must_measure` | no step's memory was measured under these actions | the next measured step at this size |
| `due` is not None | the solver runs on a thread | the end of step `due`, when the result is applied |
| `must_solve` | predictions changed while the solver ran | the next start of the solver |
| `is_borrowed` | a solver run may find a faster policy | a solver run that is worth its time |
| `is_fresh` | no step has run under the present plans | the end of the first step under these plans |
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from adacc_hf.adapt.checkpoint_files import SavedSizePolicy
from adacc_hf.adapt.events import OutliersTracked
from adacc_hf.adapt.policy_selection import current_policy
from adacc_hf.adapt.replanner import Replanner, Tracking
from adacc_hf.adapt.step_timer import StepTimes
from adacc_hf.torch_glue.batch_shapes import BatchShapes

if TYPE_CHECKING:
    from adacc_hf.run.policy_handle import BlockPlans


@dataclass(slots=True)
class SizePolicy:
    """Policy for one batch size during a run, with its replanner, its plans and measurements of its steps."""

    shapes: BatchShapes | None
    """Sizes of the batch that the policy was made for, or None if unknown."""
    replanner: Replanner
    plans: BlockPlans
    due: int | None = None
    """Number of the step after which the running solver's result is applied, or None if the solver does not run."""
    must_solve: bool = False
    """True if the profile's predictions changed while the solver ran."""
    is_provisional: bool = False
    """True if the policy was chosen to need little memory, and is to be replaced once the memory of a whole step is
    measured."""
    must_measure: bool = True
    """True if the memory of a step has not been measured yet under the current actions."""
    is_extrapolated: bool = False
    """True if the profile was not measured, but predicted from the profile of another batch size."""
    is_borrowed: bool = False
    """True if a solver run may find a faster policy (`ExtrapolatedPolicies.can_improve`)."""
    num_borrowed: int = 1
    """Number of batches so far under a policy that a solver run may improve (`is_borrowed`)."""
    num_steps: int = 0
    times: StepTimes = field(default_factory=StepTimes)
    is_fresh: bool = False
    """True until a first step has run under the current plans. This step is slower, because it prepares the plans."""
    predicted_step_ms: float | None = None
    error: float | None = None
    """Largest round-trip error in the last tracking step."""
    gradient_error: float | None = None
    measured_peak_bytes: int | None = None

    def predicted_peak_bytes(self) -> int:
        """Return the predicted peak of the current step under the policy."""
        return current_policy(self.replanner.profile, self.replanner.policy).predicted_peak_bytes

    def saved(self) -> SavedSizePolicy:
        """Return the state for a checkpoint, from which a resumed run restores this size policy."""
        replanner = self.replanner
        return SavedSizePolicy(
            policy=replanner.policy,
            profile=replanner.priced,
            prices=None if replanner.profile == replanner.priced else replanner.profile,
            searched=None if replanner.searched == replanner.priced else replanner.searched,
            shapes=self.shapes,
            due=self.due,
            num_tracked=replanner.num_tracked,
            memory_budget=replanner.memory_budget,
            is_provisional=self.is_provisional,
            is_told=self.is_extrapolated,
            is_borrowed=self.is_borrowed,
        )

    def resume(self, record: SavedSizePolicy) -> None:
        """Restore the state in a checkpoint's `record`.

        If the solver was running when the state was saved, start the solver again.
        """
        self.replanner.num_tracked, self.due = record.num_tracked, record.due
        self.is_provisional, self.is_borrowed = record.is_provisional, record.is_borrowed
        if record.memory_budget is not None:
            self.replanner.memory_budget = record.memory_budget
        if record.prices is not None:
            self.replanner.profile = record.prices
        if record.searched is not None:
            self.replanner.searched = record.searched
        if self.due is not None:
            self.replanner.start_solving()

    def tracked(self, step: int, tracking: Tracking) -> OutliersTracked:
        """Return the history's event for a tracking step. The event includes the median time of the normal steps
        before."""
        gradients = tracking.gradients.values()
        return OutliersTracked(
            step=step,
            reason=tracking.reason,
            num_outliers=tracking.num_outliers,
            errors=tracking.errors,
            compression_rate=self.replanner.policy.predicted_stored_bytes / self.replanner.profile.plain_stored_bytes,
            gradient_error=max((gradient.error for gradient in gradients), default=None),
            gradient_cosine=min((gradient.cosine for gradient in gradients), default=None),
            step_ms=self.times.median_ms,
            predicted_step_ms=self.predicted_step_ms,
        )
