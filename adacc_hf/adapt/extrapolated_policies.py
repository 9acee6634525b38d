"""ExtrapolatedPolicies: makes policies for batch sizes that were not profiled, from a profile of another size."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import replace

from adacc_hf.adapt.policy_cache import PolicyCache
from adacc_hf.adapt.policy_selection import UNCERTAINTY, current_policy, has_same_actions, over_bound, with_margin
from adacc_hf.adapt.profile_updates import without_codecs
from adacc_hf.adapt.replanner import Replanner
from adacc_hf.adapt.run_context import RunContext
from adacc_hf.artifacts.config import Budget
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.size_model import SIZE_CLASS_RATIO
from adacc_hf.price.memory_profile import with_missing_bytes
from adacc_hf.price.resized_profile import resize_profile
from adacc_hf.solve.solver import provisional_policy, recomputing_policies, solve_policy
from adacc_hf.torch_glue.batch_shapes import BatchShapes, describe, num_elements, to_profile_shapes

log = logging.getLogger(__name__)

USED_UP = 0.9
"""Fraction of the budget. If a policy of another size class fits and needs at least this fraction at a new size, it
counts as using up the budget, and is used permanently. If it needs less, it is used only until a solver run is worth
its time (`PolicyChoice`)."""

FAR_ABOVE = 0.05
"""Fraction of the budget. For a batch's own sizes, the solver is not called if even the policy that needs the least
memory at another size exceeds the budget by more than this fraction. A fraction of 0 would be too strict, because the
best policy at the new sizes may need slightly less memory. For the bounds of a size class it is 0, because the batch
gets a policy for its own sizes if none fits there."""


class ExtrapolatedPolicies:
    """Builder of policies for size classes (batches of similar sizes) that were not profiled."""

    def __init__(self, context: RunContext, cache: PolicyCache) -> None:
        self._context, self._cache, self._config = context, cache, context.config
        self._solver_ms: float | None = None

    @property
    def solver_ms(self) -> float:
        """Time in ms of the last solver run for a size class.

        Until the solver has run for a size class, this is the time of the solver run for the run's first policy.
        """
        if self._solver_ms is None:
            facts = dict(self._cache.size_model()[0].replanner.policy.facts)
            return 1e3 * float(facts.get("seconds", 0.0))
        return self._solver_ms

    def policy_for(
        self, sizes: BatchShapes, shapes: BatchShapes, may_borrow: bool
    ) -> tuple[BatchShapes, Profile, Policy]:
        """Return (sizes, profile, policy) for a batch of `shapes` in the size class `sizes`.

        `sizes` are the upper bounds of the class. If no policy for these sizes fits the budget, the result is for the
        batch's own sizes instead. If `may_borrow`, the policy may be one that leaves budget unused: that of another
        size class, or full recomputation.
        """
        settings = self._context.settings
        if not self._cache.is_above_budget(sizes, settings):
            profile = self.profile_at(sizes)
            others = self._others(profile)
            policy = self._borrow(profile, others) if may_borrow else None
            try:
                return sizes, profile, policy or self._within(profile, self._with_room(profile), others, far=0.0)
            except InfeasibleBudgetError:
                self._cache.note_above_budget(sizes, settings)
        sizes = tuple(shape for shape in shapes if shape.name in {other.name for other in sizes})
        profile = self.profile_at(sizes)
        return sizes, profile, self.solve_or_least(sizes, profile)

    def _borrow(self, profile: Profile, others: list[Policy]) -> Policy | None:
        """Return the fastest of `others` (policies of other size classes) and of full recomputation that fits, without
        a solver run. Return None if none fits, or if no solver run can improve it: it is plain training, or uses up the
        budget (USED_UP)."""
        budget = Budget.resolve(self._with_room(profile), profile, self._config)
        policies = list(others)
        if budget.limits_peak:  # a budget of stored bytes is solved quickly
            policies += recomputing_policies(self._allowed(profile), self._config)
        fitting = [policy for policy in policies if budget.needed_bytes(policy) <= budget.nbytes]
        fastest = min(fitting, key=lambda policy: policy.predicted_overhead_ms, default=None)
        if fastest is None or fastest.is_plain or budget.needed_bytes(fastest) >= USED_UP * budget.nbytes:
            return None
        return fastest

    def can_improve(self, profile: Profile, policy: Policy) -> bool:
        """Return True if a solver run for `profile` may find a faster policy than `policy`.

        It may if `policy` needs less than the fraction `USED_UP` of the budget, or was chosen because it needs the
        least memory. For plain training, return False, because no policy is faster.
        """
        budget = Budget.resolve(self._with_room(profile), profile, self._config)
        current, least = current_policy(profile, policy), self._least_at(profile)
        is_least = least is not None and has_same_actions(current, least)
        return not policy.is_plain and (is_least or budget.needed_bytes(current) < USED_UP * budget.nbytes)

    def solve_again(self, profile: Profile) -> Policy | None:
        """Run the solver for a size class whose policy it may improve. Return None if no policy fits."""
        try:
            return self._solve(self._allowed(profile), self._with_room(profile))
        except InfeasibleBudgetError:
            return None

    def provisional(self, profile: Profile) -> Policy:
        """Return a policy that needs little memory, for use until the memory of a step has been measured.

        `profile` is the profile at the size of the batches.
        """
        budget = Budget.resolve(self._context.memory_budget, profile, self._config)
        limit = int(budget.nbytes / (1 + UNCERTAINTY))
        return provisional_policy(self._allowed(profile), limit, with_margin(self._config))

    def profile_at(self, sizes: BatchShapes) -> Profile:
        """Return the predicted profile for batches of `sizes`.

        If a measured step took more bytes than its profile predicted (for metrics of the outputs, for example), the
        excess, scaled to the batch, is included.
        """
        profile = resize_profile(self._cache.size_model()[0].replanner.profile, to_profile_shapes(sizes))
        missing, counted = self._context.missing_bytes, self._context.counted_elements
        ratio = num_elements(sizes) / counted if counted else 1.0
        if ratio <= 1 or not any(missing.values()):
            return profile
        return with_missing_bytes(profile, {moment: int(nbytes * (ratio - 1)) for moment, nbytes in missing.items()})

    def solve_or_least(self, sizes: BatchShapes, profile: Profile) -> Policy:
        """Return a policy that fits the budget, with room for the uncertainty of predicted peaks if possible.

        If a policy fits only without this room, warn. If no policy fits the budget at all, warn and return the policy
        that needs the least memory, or raise InfeasibleBudgetError if `on_over_budget` is "error".
        """
        with_room = self._with_room(profile)
        others = self._others(profile)
        far = math.inf if self._config.on_over_budget == "error" else FAR_ABOVE  # the run would end: the solver decides
        least, floor, bound, why = None, 0, 0, ""
        for candidate in dict.fromkeys((with_room, self._context.memory_budget)):
            if least is not None and floor > Budget.resolve(candidate, profile, self._config).nbytes:
                break
            try:
                policy = self._within(profile, candidate, others, far)
            except InfeasibleBudgetError as error:
                floor, bound, why, least = error.smallest_budget_bytes, error.bound_bytes, str(error), error.least
                continue
            if candidate != with_room:
                self._warn_uncertain(sizes, policy)
            return policy
        assert least is not None  # the solver's errors contain this policy
        text = f"batches of {describe(sizes)} need {floor} bytes at least"
        fitting = self._largest_fitting(sizes, least)
        text += f", batches of {describe(fitting)} would fit the budget" if fitting else ""
        if self._config.on_over_budget == "error":
            raise InfeasibleBudgetError(f"{text}: {why}", floor, bound)
        log.warning("Adacc: %s. Training continues with the least memory: %s", text, why)
        self._context.warnings.add(sizes)
        self._context.note_memory(f"{text}: {why}")
        return least

    def _allowed(self, profile: Profile) -> Profile:
        """Return `profile` without switched-off codecs, and without codecs for values below `min_compress_bytes`."""
        return without_codecs(profile, self._context.switched_off).without_codecs_below(self._config.min_compress_bytes)

    def _within(self, profile: Profile, memory_budget: str | float | int, others: list[Policy], far: float) -> Policy:
        """Return a policy for `profile` that fits `memory_budget`.

        The candidates are `others` (the policies of other batch sizes) and the policy that needed the least memory at
        another size. A candidate is reused if it fits and needs nearly the whole budget. Otherwise the solver runs.

        Raises InfeasibleBudgetError if no policy fits the budget. If the candidate with the least memory exceeds the
        budget by more than the fraction `far`, the error is raised without a solver run.
        """
        budget = Budget.resolve(memory_budget, profile, self._config)
        allowed = self._allowed(profile)
        least = self._least_at(allowed)
        policies = others if least is None else [*others, least]
        candidates = [p for p in policies if USED_UP * budget.nbytes <= budget.needed_bytes(p) <= budget.nbytes]
        if candidates:
            return min(candidates, key=lambda policy: policy.predicted_overhead_ms)
        if least is not None:
            _refuse_above(least, budget, far)
        try:
            return self._solve(allowed, memory_budget)
        except InfeasibleBudgetError as error:
            self._cache.least = error.least
            raise

    def _solve(self, profile: Profile, memory_budget: str | float | int) -> Policy:
        start = time.perf_counter()
        try:
            return solve_policy(profile, memory_budget, with_margin(self._config))
        finally:
            self._solver_ms = 1e3 * (time.perf_counter() - start)

    def _others(self, profile: Profile) -> list[Policy]:
        """Return the policies of other batch sizes that may be used for `profile`, with memory and time predicted by
        `profile`."""
        allowed = self._allowed(profile)
        policies = {(p.plans, p.blocks, p.head): p for p in (s.replanner.policy for s in self._cache.all)}
        return [current_policy(allowed, p) for p in policies.values() if self._is_usable(p, allowed)]

    def _least_at(self, profile: Profile) -> Policy | None:
        """Return the policy that needs the least memory at another size, predicted by `profile`, or None if there is
        none that can be used for `profile`."""
        least = self._cache.least
        return None if least is None or not self._is_usable(least, profile) else current_policy(profile, least)

    def _is_usable(self, policy: Policy, profile: Profile) -> bool:
        """Return True if `policy` was made for blocks with the operators of `profile`, and uses only allowed codecs. On
        a batch of one sample, blocks may run other operators."""
        pairs = [(block, policy.plan_of(block.name)) for block in profile.blocks]
        has_same_operators = all(
            plan.kind == profile.kinds[profile.kind_index(block, plan)].digest for block, plan in pairs
        )
        return has_same_operators and not over_bound(profile, policy, self._config)

    def _with_room(self, profile: Profile) -> str | float | int:
        """Return a memory budget for `profile`: the run's budget, reduced by the uncertainty of predicted peaks."""
        budget = Budget.resolve(self._context.memory_budget, profile, self._config)
        uncertainty = self._uncertainty
        if budget.limits_peak and uncertainty:
            return int(budget.nbytes / (1 + uncertainty))
        return self._context.memory_budget

    @property
    def _uncertainty(self) -> float:
        return self._cache.size_model()[1].uncertainty

    def _warn_uncertain(self, sizes: BatchShapes, policy: Policy) -> None:
        """Warn that batches of these sizes may exceed the budget, which has no room for prediction errors."""
        text = (
            f"batches of {describe(sizes)} may take more than memory_budget={self._context.memory_budget!r}: the "
            f"predicted peak of {policy.predicted_peak_bytes} bytes is exact to {self._uncertainty:.0%} only"
        )
        log.warning("Adacc: %s", text)
        self._context.note_memory(text)

    def _largest_fitting(self, sizes: BatchShapes, least: Policy) -> BatchShapes | None:
        """Return the largest size class with shorter sequences than `sizes` for which the policy `least` fits the
        budget, or None."""
        length = max(shape.size[1] for shape in sizes if len(shape.size) > 1) if any(s.size[1:] for s in sizes) else 0
        for shorter in sorted({int(length / SIZE_CLASS_RATIO**k) for k in range(1, 16)} - {0}, reverse=True):
            cut = tuple(
                replace(s, size=tuple(max(1, n * shorter // length) if d == 1 else n for d, n in enumerate(s.size)))
                for s in sizes
            )
            size_class = self._cache.class_of(cut)
            if size_class is None:
                return None
            profile = self.profile_at(size_class)
            if over_bound(profile, least, self._config):
                continue
            replanner = Replanner(profile, least, self._config, self._context.memory_budget)
            if not replanner.is_over_budget(current_policy(profile, least).predicted_peak_bytes):
                return size_class
        return None


def _refuse_above(least: Policy, budget: Budget, far: float) -> None:
    """Raise InfeasibleBudgetError if `least`, the policy that needs the least memory at another size, exceeds `budget`
    by more than the fraction `far`: the solver would take seconds to find one that needs hardly less."""
    needed = budget.needed_bytes(least)
    if needed > (1 + far) * budget.nbytes:
        what = "peak" if budget.limits_peak else "stored bytes"
        message = f"memory_budget={budget.setting!r} is below {needed} bytes, the least {what} that is known"
        raise InfeasibleBudgetError(message, needed, bound_bytes=0, least=least)
