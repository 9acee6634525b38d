"""PolicyChoice: the choice of a policy for each micro-batch, which depends on the sizes of the micro-batch's tensors.

NOTE [Choice of a policy]. This is the only place where a micro-batch gets its policy.
| sizes of the micro-batch | policy |
|---|---|
| in a size class with a policy | that policy |
| in a new class, before the first measured step | the run's first policy if it fits, else one with a low peak |
| in a new class, later | another class's fitting policy, or full recomputation, until a solver run is worth its time |
| in a new class, if none of these fits, or after the solver run | a policy solved for the class's predicted profile |
| in a class whose upper bounds exceed the budget | the policy for the smallest known sizes that the batch fits into |
| in a new class, with several ranks or beyond MAX_SIZE_POLICIES | as in the rows above, without tracking |
| in no class, but within a profiled size | the policy of the smallest such size |
| in no class and larger than each profiled size | none: torch's checkpoint, recorded for a policy of its own |
"""

from __future__ import annotations

from collections.abc import Mapping

from adacc_hf.adapt.coverage import ALL_BLOCKS, SAME_SIZE, refuse_uncovered
from adacc_hf.adapt.events import PolicySet, predictions
from adacc_hf.adapt.extrapolated_policies import ExtrapolatedPolicies
from adacc_hf.adapt.fallback_stats import NO_POLICY, DivergedBatches, ratio
from adacc_hf.adapt.policy_cache import PolicyCache
from adacc_hf.adapt.policy_selection import current_policy
from adacc_hf.adapt.replanner import Replanner
from adacc_hf.adapt.run_context import RECORDED_STEPS, RunContext
from adacc_hf.adapt.size_policy import SizePolicy
from adacc_hf.artifacts.config import Budget
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.run.entries import OTHER_OPERATORS
from adacc_hf.run.policy_handle import BlockPlans, PolicyHandle
from adacc_hf.torch_glue.batch_shapes import BatchShapes, describe, num_elements
from adacc_hf.torch_glue.distributed import num_ranks
from adacc_hf.torch_glue.progress import SOLVING, interruption


class PolicyChoice:
    """Policies of a run by batch size, the active policy, and the sizes of the current step's micro-batches."""

    def __init__(self, handle: PolicyHandle, context: RunContext) -> None:
        self.cache = PolicyCache()
        self.extrapolated = ExtrapolatedPolicies(context, self.cache)
        self.current: SizePolicy | None = None
        """Size policy (policy of one batch size, with its state) that the blocks follow now.

        None if the blocks run under torch's checkpoint, or under untracked plans, which are not adapted to the data
        (`PolicyCache.untracked`).
        """
        self.plans: BlockPlans | None = None
        """Plans that the blocks follow now, or None under torch's checkpoint."""
        self.shapes: BatchShapes = ()
        """Sizes of the most recent micro-batch."""
        self.largest: BatchShapes = ()
        """Sizes of the largest micro-batch of the step."""
        self.batch_bytes = 0
        """Bytes of the largest micro-batch of the step."""
        self.diverged = DivergedBatches(context.config, context.note_memory)
        self.context = context
        self._handle = handle
        self._used: dict[int, SizePolicy | None] = {}
        """Size policies of the step's micro-batches, by the `id` of their plans. None for untracked plans, which have
        no replanner and are not adapted to the data."""
        self._lasts = False
        """True if the chosen policy also applies to the next micro-batch, if this has the same shapes."""
        self.has_replaced_borrowed = False
        """True if, since the last step's end, a policy made for another batch size was replaced by one for the batch's
        own size."""
        self._is_alone = num_ranks() == 1
        handle.tape_cache.may_record = self._may_record

    @property
    def shown(self) -> SizePolicy:
        """Policy of the most recent micro-batch, with its state.

        If this micro-batch ran under torch's checkpoint, or under untracked plans (plans that are not adapted to the
        data), the result is the run's first policy.
        """
        return self.current or self.cache.all[0]

    def begin_step(self) -> None:
        """Drop the records of the previous step's micro-batches."""
        self._used.clear()
        self.largest, self.batch_bytes = (), 0

    def choose(self, shapes: BatchShapes, nbytes: int) -> None:
        """Apply the policy for a micro-batch of `shapes`. `nbytes` is the total size of the micro-batch's tensors."""
        self.batch_bytes = max(self.batch_bytes, nbytes)
        if not self._lasts or shapes != self.shapes:
            self._choose(shapes)
        self._used[id(self.plans)] = self.current
        if shapes != self.largest and num_elements(shapes) > num_elements(self.largest):
            self.largest = shapes

    def _choose(self, shapes: BatchShapes) -> None:
        self.shapes = shapes
        sizes = self.cache.class_of(shapes)
        size_policy = self.cache.around(shapes) if sizes is None else self._of_class(sizes, shapes)
        if size_policy is not None and self.context.tightened is not None:
            self._keep_to(self.context.tightened, size_policy)
        plans = None if size_policy is None else size_policy.plans
        if size_policy is None and sizes is not None:
            plans = self.cache.untracked_plans(sizes, shapes, self.context.settings)
        if size_policy is not self.current or plans is not self.plans:
            self._put(size_policy, plans)
        if size_policy is not None:
            self.context.warnings.before(shapes, size_policy)
        elif plans is None:
            reason = f"no profile predicts batches of {describe(shapes)}"
            refuse_uncovered(self.context.config, ALL_BLOCKS, reason, SAME_SIZE)
            self.context.warnings.before_checkpointing(shapes, self._reference)
        else:
            self.context.warnings.before_untracked(shapes, sizes or shapes, plans.policy, self._reference)
        # Each batch whose bucket lacks a policy is counted.
        is_final = size_policy is not None and not size_policy.is_borrowed
        self._lasts = is_final and not self.cache.unplanned

    def _of_class(self, sizes: BatchShapes, shapes: BatchShapes) -> SizePolicy | None:
        """Return the size policy of a batch of `shapes`, whose class is `sizes`. Make one if the class is new. Return
        None if the class has untracked plans only."""
        size_policy = self.cache.within_class(sizes, shapes)
        if size_policy is not None and size_policy.is_borrowed:
            self._count_borrowed(size_policy)
        if size_policy is not None or self.cache.untracked_plans(sizes, shapes, self.context.settings) is not None:
            return size_policy
        measured, _ = self.cache.size_model()
        if measured.is_provisional:
            return self._before_measurement(sizes, measured)
        with interruption(SOLVING, f"solving for batches of {describe(sizes)}"):
            sizes, profile, policy = self.extrapolated.policy_for(sizes, shapes, may_borrow=self._is_alone)
        if not self._is_alone or self.cache.is_full:
            self._add_untracked(sizes, policy)
            return None
        size_policy = self.add_extrapolated(sizes, profile, policy)
        size_policy.is_borrowed = self.extrapolated.can_improve(profile, policy)
        return size_policy

    def _count_borrowed(self, size_policy: SizePolicy) -> None:
        """Count a batch under a borrowed policy. If the overhead of all counted batches has reached the time of a
        solver run, solve for the batch's size class, and follow the new policy if it is faster."""
        replanner = size_policy.replanner
        size_policy.num_borrowed += 1
        overhead_ms = (size_policy.num_borrowed - 1) * replanner.policy.predicted_overhead_ms
        if overhead_ms < self.extrapolated.solver_ms or size_policy.due is not None:
            return
        size_policy.is_borrowed = False
        with interruption(SOLVING, f"solving for batches of {describe(size_policy.shapes or ())}"):
            policy = self.extrapolated.solve_again(replanner.profile)
        borrowed_ms = current_policy(replanner.profile, replanner.policy).predicted_overhead_ms
        if policy is None or policy.predicted_overhead_ms >= borrowed_ms:
            return
        replanner.adopt(policy)
        self.follow(size_policy, policy)
        self._measure_if_larger(size_policy)
        self.has_replaced_borrowed = True
        reason = (
            f"for batches of {describe(size_policy.shapes or ())}, which have come {size_policy.num_borrowed} times"
        )
        self.context.note(PolicySet(step=self.context.step, reason=reason, **predictions(policy)))

    def _keep_to(self, tightened: float | int, size_policy: SizePolicy) -> None:
        """Solve again for `size_policy` if its policy needs more than `tightened`, the budget since memory ran out at
        another size. If no policy fits, follow the one that needs the least memory."""
        replanner = size_policy.replanner
        budget = Budget.resolve(tightened, replanner.profile, self.context.config)
        if replanner.memory_budget == tightened or budget.needed_bytes(replanner.policy) <= budget.nbytes:
            return
        sizes = describe(size_policy.shapes or self.shapes)
        with interruption(SOLVING, f"solving for batches of {sizes} again, within memory_budget={tightened}"):
            try:
                policy = self.tighten(size_policy, tightened)
            except InfeasibleBudgetError as error:
                policy = error.least or replanner.policy  # the solver's errors contain the least
                replanner.memory_budget = tightened
                replanner.adopt(policy)
                self.follow(size_policy, policy)
        reason = f"for batches of {sizes}, because memory ran out at another size"
        self.context.note(PolicySet(step=self.context.step, reason=reason, **predictions(policy)))

    def tighten(self, size_policy: SizePolicy, memory_budget: float | int) -> Policy:
        """Solve for `memory_budget`, which is smaller than before, and follow the new policy from now on.

        Raises InfeasibleBudgetError if no policy fits. The old policy then remains.
        """
        policy = size_policy.replanner.solve_within(memory_budget)
        size_policy.due, size_policy.must_solve = None, False
        self.follow(size_policy, policy)
        return policy

    def _before_measurement(self, sizes: BatchShapes, measured: SizePolicy) -> SizePolicy | None:
        """Return the size policy for the new class `sizes` before a step was measured: `measured`, the run's first one,
        if its plans fit, else a new one that needs little memory. With several ranks, store only its plans, and return
        None."""
        profile = self.extrapolated.profile_at(sizes)
        policy = current_policy(profile, measured.replanner.policy)
        if not measured.replanner.is_over_budget(policy.predicted_peak_bytes):
            return measured
        with interruption(SOLVING, f"solving for batches of {describe(sizes)}"):
            policy = self.extrapolated.provisional(profile)
        if not self._is_alone:
            self._add_untracked(sizes, policy)
            return None
        added = self.add_extrapolated(sizes, profile, policy)
        added.is_provisional = True
        return added

    def add(
        self,
        shapes: BatchShapes | None,
        profile: Profile,
        policy: Policy,
        is_provisional: bool = False,
        is_extrapolated: bool = False,
    ) -> SizePolicy:
        """Add `policy` for batches with the sizes `shapes`, and apply the policy. Return the new `SizePolicy`.

        `shapes` is None if the sizes are unknown. If `is_provisional` is True, the policy is replaced once the memory
        of a step has been measured. `is_extrapolated` is True if `profile` was predicted from the profile of another
        size.
        """
        size_policy = self._size_policy(shapes, profile, policy, is_extrapolated)
        size_policy.is_provisional = is_provisional
        self.cache.add(size_policy)
        self._put(size_policy, size_policy.plans)
        self.context.measure_after_steps(RECORDED_STEPS)
        self.context.must_measure |= is_provisional
        return size_policy

    def add_extrapolated(self, sizes: BatchShapes, profile: Profile, policy: Policy) -> SizePolicy:
        """Add `policy` for the size class `sizes`, and return its record, a `SizePolicy`.

        `profile` was extrapolated from the profile of another size.
        """
        size_policy = self._size_policy(sizes, profile, policy, is_extrapolated=True)
        size_policy.num_steps = RECORDED_STEPS
        self._measure_if_larger(size_policy)
        self.cache.add(size_policy)
        self._lasts = False
        reason = f"for batches of {describe(sizes)}"
        self.context.note(PolicySet(step=self.context.step, reason=reason, **predictions(policy)))
        return size_policy

    def _add_untracked(self, sizes: BatchShapes, policy: Policy) -> None:
        """Store `policy` for the size class `sizes` without a replanner: it is not adapted to the data."""
        self.cache.add_untracked(sizes, self._handle.prepare(policy, self._handle.plans), self.context.settings)

    def _measure_if_larger(self, size_policy: SizePolicy) -> None:
        """Request a measurement of a step's memory if batches of this size are larger than every measured batch."""
        largest = self.cache.size_model()[1].max_measured_elements
        size_policy.must_measure = num_elements(size_policy.shapes or ()) > largest
        self.context.must_measure |= size_policy.must_measure

    def _size_policy(
        self, shapes: BatchShapes | None, profile: Profile, policy: Policy, is_extrapolated: bool
    ) -> SizePolicy:
        replanner = Replanner(profile, policy, self.context.config, self.context.memory_budget)
        replanner.switch_off(self.context.switched_off)
        plans = self._handle.prepare(policy, self._handle.plans)
        return SizePolicy(shapes, replanner, plans, is_extrapolated=is_extrapolated)

    def follow(self, size_policy: SizePolicy, policy: Policy) -> None:
        """Replace the policy of `size_policy` (the record of one batch size) by `policy`, from the next micro-batch on.

        The times of normal steps under the old policy are dropped. If the guard against degraded gradients has to
        check the new policy, the policy is tracked as often as the run's first policy.
        """
        if self.context.guard.check_new_policy():
            self.context.policy_step = self.context.step
        self._lasts = False
        size_policy.plans = self._handle.prepare(policy, size_policy.plans)
        size_policy.times.start_over()
        size_policy.is_fresh = True
        if size_policy is self.current:
            self._put(size_policy, size_policy.plans)

    def _put(self, size_policy: SizePolicy | None, plans: BlockPlans | None) -> None:
        self._handle.follow(plans)
        self.current, self.plans, self._lasts = size_policy, plans, False

    def suspend(self) -> None:
        """Run the blocks of the current micro-batch under torch's checkpoint, because it is to be recorded."""
        self._used.pop(id(self.plans), None)
        self._put(None, None)
        self._used[id(None)] = None

    @property
    def wants_profile(self) -> bool:
        """True if the current micro-batch is to be recorded, because its size has no policy."""
        return self._is_alone and self.cache.wants(self.shapes)

    def check_budget(self) -> None:
        """Compare the predicted peak of the next micro-batch with the budget, even if the previous micro-batch had the
        same shapes."""
        self._lasts = False

    def used(self) -> list[SizePolicy | None]:
        """Return the size policies under which the step's micro-batches ran. None stands for micro-batches that ran
        under torch's checkpoint, or under untracked plans (plans that are not adapted to the data)."""
        return list(self._used.values()) or [self.current]

    def ran_alone(self) -> bool:
        """Return True if all micro-batches of the step ran under the active policy."""
        return self.current is not None and all(plans == id(self.current.plans) for plans in self._used)

    def end_micro_batch(self, fallbacks: Mapping[str, int]) -> tuple[float, dict[str, int]]:
        """Return the predicted overhead in ms of the finished micro-batch, and its number of fallbacks by reason.

        `fallbacks` contains the number of calls of blocks that did not follow their plans, by reason.
        """
        if self.plans is None:
            self.diverged.add(0.0)
            return self._fallback_ms(), {NO_POLICY: 1}
        policy = self.plans.policy if self.current is None else self.current.replanner.policy  # at the current prices
        planned_ms = policy.predicted_overhead_ms * ratio(
            self.shapes, None if self.current is None else self.current.shapes
        )
        share = min(1.0, sum(fallbacks.values()) / len(policy.blocks))
        self.diverged.add(share)
        if not fallbacks:
            return planned_ms, {}
        return (1 - share) * planned_ms + share * self._fallback_ms(OTHER_OPERATORS in fallbacks), dict(fallbacks)

    def _fallback_ms(self, ran_planned: bool = False) -> float:
        """Return the overhead that the most recent micro-batch would have under full recomputation. `ran_planned` as in
        `DivergedBatches.overhead_ms`."""
        return self.diverged.overhead_ms(self.shapes, self._reference, self.context.memory_budget, ran_planned)

    def _may_record(self) -> bool:
        """Return True if the micro-batch fits the budget even while a block's call is being recorded."""
        return self.diverged.may_record(self.shapes, self._reference, self.context.memory_budget)

    @property
    def _reference(self) -> SizePolicy:
        """Size policy that was profiled at the size closest to the most recent micro-batch."""
        return self.current or self.cache.measured or self.shown
