"""SizePolicy: the policy of a run for one batch size, with its state and measurements."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from adacc_hf.adapt.step_timer import StepTimes
from adacc_hf.torch_glue.batch_shapes import BatchShapes

if TYPE_CHECKING:
    from adacc_hf.artifacts.policy import Policy
    from adacc_hf.artifacts.profile import Profile
    from adacc_hf.run.policy_handle import BlockPlans


@dataclass(slots=True)
class SizePolicy:
    """Record of a run for one size class: the profile and the policy of its batches, and measurements of its steps."""

    shapes: BatchShapes | None
    """Sizes of the batch that the policy was made for, or None if unknown."""
    base: Profile
    """Profile for these sizes, recorded or predicted from other sizes."""
    profile: Profile
    """`base` with the run's corrections (`Corrections.applied`)."""
    policy: Policy
    plans: BlockPlans
    version: int
    """Version of the corrections in `profile`."""
    searched: Profile
    """Profile for which the solver ran last, or for which the policy was chosen."""
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
