"""TrackingSteps: measures codec errors, outlier channels and gradients in a few steps of the run (tracking steps)."""

from __future__ import annotations

import logging

from adacc_hf.adapt.events import GuardVerdict
from adacc_hf.adapt.outlier_tracking import Observation
from adacc_hf.adapt.policy_choice import PolicyChoice
from adacc_hf.adapt.replanner import Tracking
from adacc_hf.adapt.replanning import Replanning
from adacc_hf.adapt.run_context import RunContext
from adacc_hf.adapt.size_policy import SizePolicy
from adacc_hf.torch_glue.batch_shapes import describe

log = logging.getLogger(__name__)


class TrackingSteps:
    """Measurements in tracking steps, for the policies of all batch sizes that use lossy codecs.

    `start` is called at the beginning of the step, and `finish` at the end of the step.
    """

    def __init__(self, choice: PolicyChoice, replanning: Replanning, context: RunContext) -> None:
        self.is_on = False
        """True during a tracking step."""
        self._choice, self._replanning, self._context = choice, replanning, context
        self._has_said_room = False

    def start(self) -> None:
        """Begin the measurements of the current step.

        If a logged loss was suspicious, or a new policy is to be checked, gradients are compared in one block of each
        kind (blocks that run the same operators).
        """
        every_kind = self._context.guard.suspicion is not None
        for size_policy in self._choice.cache.all:
            if size_policy.replanner.has_work():
                size_policy.replanner.start_tracking(size_policy.plans, every_kind=every_kind)
                self.is_on = True
        self._say_room()
        # On a CPU, measuring memory needs a profiler and takes as long as a step, so it is not repeated for unchanged
        # actions while tracking.
        must_measure = any(size_policy.must_measure for size_policy in self._choice.cache.all)
        self._context.must_measure = not self.is_on or must_measure

    def _say_room(self) -> None:
        """Log once that the budget has no room to compare gradients with exact ones."""
        lack_room = [s for s in self._choice.cache.all if s.replanner.lacks_room]
        if not lack_room or self._has_said_room:
            return
        self._has_said_room = True
        sizes = "batches" if lack_room[0].shapes is None else f"batches of {describe(lack_room[0].shapes)}"
        log.info(
            "Adacc: at %s the budget has no room to compare the gradient of a block with the exact one: none is "
            "compared",
            sizes,
        )

    def finish(self, step: int) -> None:
        """Update the predictions from the measurements of the tracking step.

        Start the solver for each size whose predictions changed. Measurements at one batch size are also used for the
        same blocks at all other batch sizes.
        """
        self.is_on = False
        guard, size_policies = self._context.guard, self._choice.cache.all
        suspicion = guard.take_suspicion()
        must_solve, is_degraded = {}, False
        tracked = [size_policy for size_policy in size_policies if size_policy.replanner.is_tracking]
        observed = Observation.merged([size_policy.replanner.observed() for size_policy in tracked])
        for size_policy in size_policies:
            tracking = size_policy.replanner.reprice(observed)
            must_solve[id(size_policy)] = tracking.needs_solving
            if size_policy not in tracked:
                continue
            size_policy.error = max(tracking.errors.values(), default=None)
            size_policy.gradient_error = max((g.error for g in tracking.gradients.values()), default=None)
            self._context.note(size_policy.tracked(step, tracking))
            guard.switched_off |= size_policy.replanner.switched_off
            doubt = suspicion or guard.doubt(tracking)
            is_degraded |= doubt is not None and self._judge(step, size_policy, doubt, tracking)
        for size_policy in size_policies:
            size_policy.replanner.switch_off(guard.switched_off)
            if is_degraded or must_solve.get(id(size_policy)):
                self._replanning.start(step, size_policy)

    def _judge(self, step: int, size_policy: SizePolicy, doubt: str, tracking: Tracking) -> bool:
        """Check the compared gradients because of `doubt`, and append the verdict to the history. Return True if a
        gradient is degraded."""
        is_degraded, verdict = self._context.guard.judge(doubt, size_policy.replanner.profile, tracking)
        self._context.note(GuardVerdict(step=step, reason=doubt, verdict=verdict))
        return is_degraded

    def cancel(self) -> None:
        """Stop the measurements and drop their results. Do nothing outside tracking steps."""
        for size_policy in self._choice.cache.all:
            size_policy.replanner.cancel_tracking()
        self.is_on = False


def is_tracking_step(steps_since: int, tracking: str | int) -> bool:
    """Return True if outliers and errors are measured in the step that comes `steps_since` steps after the policy was
    set.

    `tracking` is the setting of AdaccConfig. "exponential" selects the steps 1, 2, 4, ... after the policy was set. A
    number N selects every N-th step.
    """
    if tracking == "off" or steps_since < 1:
        return False
    if tracking == "exponential":
        return steps_since & (steps_since - 1) == 0
    return steps_since % int(tracking) == 0
