"""Replanning: runs the solver again during training if the predictions for a batch size have changed.

The predictions of a profile are bytes, times and errors. All ranks start the solver, and apply the result, at the same
steps.
"""

from __future__ import annotations

import logging
import time

from adacc_hf.adapt.announcements import describe_costs
from adacc_hf.adapt.events import MemoryNoted, PolicyChanged, predictions
from adacc_hf.adapt.oom_retry import tighter_budget
from adacc_hf.adapt.policy_choice import PolicyChoice
from adacc_hf.adapt.policy_selection import NOTHING_FITS
from adacc_hf.adapt.run_context import RunContext
from adacc_hf.adapt.size_policy import SizePolicy
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.torch_glue.distributed import check_same_policy, num_ranks
from adacc_hf.torch_glue.progress import SOLVING, announce, interruption

log = logging.getLogger(__name__)


class Replanning:
    """Control of the solver during training, for the policies of all batch sizes.

    If predictions have changed, the solver runs on a thread while training continues. Training waits for the solver
    after the first step whose memory was measured, and after a step that ran out of memory.
    """

    def __init__(self, choice: PolicyChoice, context: RunContext, num_micro: int) -> None:
        self._choice, self._context = choice, context
        self._num_micro = num_micro

    def start(self, step: int, size_policy: SizePolicy) -> None:
        """Start the solver for `size_policy` on a thread.

        If the solver is already running for this size, it is started again after `take_over` has applied its result.

        Do nothing if the policy is provisional: such a policy is replaced after the first measured step anyway.
        """
        if size_policy.is_provisional:
            return
        size_policy.must_solve = size_policy.due is not None
        if not size_policy.must_solve:
            size_policy.replanner.start_solving()
            size_policy.due = step + 1

    def take_over(self, step: int) -> bool:
        """Apply the results of solver runs that are due at this step. Return True if a policy changed."""
        has_changed = False
        for size_policy in self._choice.cache.all:
            if size_policy.due is None or step < size_policy.due:
                continue
            started = time.perf_counter()
            before = size_policy.replanner.policy
            with interruption(SOLVING, f"step {step}: waiting for the solver"):
                result = size_policy.replanner.take_over()
            waited_ms = (time.perf_counter() - started) * 1e3
            size_policy.due = None
            # The wait is part of this step's time. The solver's CPU time before the wait was taken from training's
            # core.
            self._context.extra_ms += max(0.0, size_policy.replanner.solver_ms - waited_ms)
            if NOTHING_FITS in result.reason:
                log.warning("Adacc: step %d: %s", step, result.reason)
                self._context.warnings.add(size_policy.shapes)
            if result.policy is not None:
                has_changed = True
                self._change(step, size_policy, before, result.policy, result.reason, waited_ms)
            elif result.reason.startswith(NOTHING_FITS):
                self._context.note(MemoryNoted(step=step, reason=result.reason))
            if size_policy.must_solve:
                self.start(step, size_policy)
        return has_changed

    def add_static(self, step: int, extra_bytes: int, reason: str, must_fit: bool = False) -> None:
        """Count `extra_bytes` more bytes as live throughout training, because of `reason`.

        Policies above the budget are replaced. Raises InfeasibleBudgetError if `must_fit` and no policy fits the
        budget.
        """
        for size_policy in self._choice.cache.all:
            replanner = size_policy.replanner
            replanner.add_static(extra_bytes)
            if replanner.is_over_budget(replanner.predicted_peak_bytes()):
                self.solve_now(step, size_policy, replanner.profile, reason, must_fit)

    def solve_now(
        self, step: int, size_policy: SizePolicy, profile: Profile, reason: str, must_fit: bool = False
    ) -> bool:
        """Run the solver on `profile`, and follow the new policy. `reason` is written to the history.

        If no policy fits the budget, raise InfeasibleBudgetError if `must_fit`. Otherwise warn and return False.
        """
        replanner, before = size_policy.replanner, size_policy.replanner.policy
        started = time.perf_counter()
        try:
            with interruption(SOLVING, f"step {step}: solving for a policy, because {reason}"):
                policy = replanner.solve_for(profile)
        except InfeasibleBudgetError as error:
            if must_fit:
                raise
            log.warning("Adacc: step %d: %s: %s; training continues with the least memory", step, NOTHING_FITS, error)
            self._context.warnings.add(size_policy.shapes)
            self._context.note(MemoryNoted(step=step, reason=f"{NOTHING_FITS}: {error}"))
            return False
        waited_ms = (time.perf_counter() - started) * 1e3
        self._change(step, size_policy, before, policy, reason, waited_ms)
        return True

    def tighten(self, step: int) -> str | None:
        """Solve for a smaller budget and follow the new policy, after a micro-batch of `step` ran out of memory.

        Return None, or the reason why there is no policy that needs less memory.
        """
        size_policy = self._choice.current
        if num_ranks() > 1:
            return "the other ranks are in the middle of it"
        if size_policy is None:
            return "it ran under full recomputation already"
        budget = tighter_budget(size_policy.replanner)
        try:
            with interruption(SOLVING, f"step {step}: solving for memory_budget={budget}, because memory ran out"):
                policy = self._choice.tighten(size_policy, budget)
        except InfeasibleBudgetError as error:
            return f"no policy needs that much less: {error}"
        self._context.tightened = budget
        reason = f"out of memory: from now on memory_budget={budget}"
        self._context.note(MemoryNoted(step=step, reason=reason, **predictions(policy)))
        return None

    def _change(
        self, step: int, size_policy: SizePolicy, before: Policy, policy: Policy, reason: str, waited_ms: float
    ) -> None:
        """Replace `before`, the policy of `size_policy`, by `policy`, and append the change to the history. Training
        has waited `waited_ms` for the solver."""
        check_same_policy(policy)
        extra_ms = (policy.predicted_overhead_ms - before.predicted_overhead_ms) * self._num_micro
        step_ms = size_policy.times.median_ms
        size_policy.predicted_step_ms = None if step_ms is None else step_ms + extra_ms
        num_actions, num_channels = num_changes(before, policy)
        if num_actions:
            size_policy.must_measure = self._context.must_measure = True
            self._context.measure_after_steps(0)
        self._context.note(
            PolicyChanged(
                step=step,
                reason=reason,
                moved=f"{num_actions} actions, {num_channels} sets of channels",
                waited_ms=waited_ms,
                step_ms=step_ms,
                predicted_step_ms=size_policy.predicted_step_ms,
                **predictions(policy),
            )
        )
        self._choice.follow(size_policy, policy)
        if num_actions:
            costs = describe_costs(policy, size_policy.replanner.priced)
            announce("Adacc: policy changed at step %d (%s): %s", step, reason, costs)


def num_changes(before: Policy, after: Policy) -> tuple[int, int]:
    """Count the activations of all blocks that a change of policy affects. Return (num_actions, num_channels).

    `num_actions` counts the activations whose action or codec changed. `num_channels` counts the activations with the
    same codec but other codec options, which in practice are other outlier channels.
    """
    num_actions = num_channels = 0
    for block, _ in before.blocks:
        old = dict(before.plan_of(block).choices)
        for value, choice in after.plan_of(block).choices:
            earlier = old.get(value, choice)
            is_other = (earlier.action, earlier.codec) != (choice.action, choice.codec)
            num_actions += is_other
            num_channels += not is_other and earlier.options != choice.options
    return num_actions, num_channels
