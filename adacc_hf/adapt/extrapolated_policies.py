"""The policy for a class of sizes that was not profiled: its profile is told from the one that was measured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from adacc_hf.adapt.policy_cache import MAX_OTHERS, PolicyCache
from adacc_hf.adapt.policy_selection import current_policy, needed_bytes, over_bound, with_margin
from adacc_hf.adapt.profile_updates import SwitchedOff, without_codecs
from adacc_hf.adapt.replanner import Replanner
from adacc_hf.artifacts.config import AdaccConfig, Budget
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.files import note_latest
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.size_model import STEP
from adacc_hf.price.batch_subsampling import at_size
from adacc_hf.price.memory_profile import with_missing
from adacc_hf.solve.solver import solve_policy
from adacc_hf.torch_glue.batch_shapes import BatchShapes, describe, num_elements, to_profile_shapes

log = logging.getLogger(__name__)

USED_UP = 0.9
"""Part of the budget that a policy for one class of sizes needs at another to be taken there as well; to solve takes a
tenth of a second or two."""


FAR_ABOVE = 0.05
"""If the policy of least memory of another size exceeds the budget by more than this part, the solver is not asked for
a better one. At another size that policy need not be the least, and nearly is."""


@dataclass(frozen=True, slots=True)
class ExtrapolatedPolicies:
    """Finds such policies, as a run stands: it keeps nothing."""

    config: AdaccConfig
    memory_budget: str | float | int
    shape_policies: PolicyCache
    switched_off: Collection[SwitchedOff]
    """Codecs that the run no longer uses."""
    missing_bytes: Mapping[str, int]
    """What the step that was counted took at its moments beside what was profiled."""
    counted_elements: int
    """Elements of the largest micro-batch of that step; 0 before a step was counted."""
    say: Callable[[str], None]
    """Puts a sentence into the run's history."""

    def of(self, sizes: BatchShapes, shapes: BatchShapes) -> tuple[BatchShapes, Profile, Policy]:
        """The policy for the class `sizes` of a batch of `shapes`, with its profile and the sizes that it is for.

        Where nothing keeps to the budget at the class's own sizes, which no batch is larger than, it is for the
        batch's.
        """
        key = sizes, self.memory_budget, frozenset(self.switched_off)
        if key not in self.shape_policies.above_budget:
            profile = self.profile_at(sizes)
            try:
                return sizes, profile, self._within(profile, self._with_room(profile))
            except InfeasibleBudgetError:
                note_latest(self.shape_policies.above_budget, key, None, MAX_OTHERS)
        sizes = tuple(shape for shape in shapes if shape.name in {other.name for other in sizes})
        profile = self.profile_at(sizes)
        return sizes, profile, self.or_least(sizes, profile)

    def allowed(self, profile: Profile) -> Profile:
        """Return `profile` with the codecs that a new policy may use: none is switched off or for too small values."""
        return without_codecs(profile, self.switched_off).without_codecs_below(self.config.min_compress_bytes)

    def profile_at(self, sizes: BatchShapes) -> Profile:
        """What batches of `sizes` are told to take.

        What a counted step took beside its profile grows with the batch, as far as is known: metrics of the outputs.
        """
        profile = at_size(self.shape_policies.told_from()[0].replanner.profile, to_profile_shapes(sizes))
        ratio = num_elements(sizes) / self.counted_elements if self.counted_elements else 1.0
        if ratio <= 1 or not any(self.missing_bytes.values()):
            return profile
        return with_missing(profile, {moment: int(b * (ratio - 1)) for moment, b in self.missing_bytes.items()})

    def or_least(self, sizes: BatchShapes, profile: Profile) -> Policy:
        """The policy for batches with this profile, with room for what is not known of them if there is any, which is
        said if not; or that of least memory, which is said, or raised as `on_over_budget` has it, where none keeps to
        the budget."""
        with_room = self._with_room(profile)
        least, floor, bound, why = None, 0, 0, ""
        for given in dict.fromkeys((with_room, self.memory_budget)):
            if least is not None and floor > Budget.resolve(given, profile, self.config).nbytes:
                break
            try:
                policy = self._within(profile, given)
            except InfeasibleBudgetError as error:
                floor, bound, why, least = error.smallest_budget_bytes, error.bound_bytes, str(error), error.least
                continue
            if given != with_room:
                self._say_doubt(sizes, policy)
            return policy
        assert least is not None  # the solver's errors have it
        text = f"batches of {describe(sizes)} need {floor} bytes at least"
        fitting = self._largest_fitting(sizes, least)
        text += f", those of {describe(fitting)} would keep to the budget" if fitting else ""
        if self.config.on_over_budget == "error":
            raise InfeasibleBudgetError(f"{text}: {why}", floor, bound)
        log.warning("Adacc: %s. Training goes on with the least memory: %s", text, why)
        self.say(f"{text}: {why}")
        return least

    def _within(self, profile: Profile, memory_budget: str | float | int) -> Policy:
        """The policy for batches with this profile: one of those in force that nearly uses up the budget there, or else
        what the solver finds. Raises InfeasibleBudgetError if nothing keeps to the budget."""
        budget = Budget.resolve(memory_budget, profile, self.config)
        allowed = self.allowed(profile)
        self._refuse_far_above(allowed, budget)
        in_force = [s.replanner.policy for s in self.shape_policies.all if _is_for(s.replanner.policy, profile)]
        told = [current_policy(allowed, policy) for policy in in_force if not over_bound(allowed, policy, self.config)]
        told = [policy for policy in told if USED_UP * budget.nbytes <= needed_bytes(policy, budget) <= budget.nbytes]
        if told:
            return min(told, key=lambda policy: policy.predicted_overhead_ms)
        try:
            return solve_policy(allowed, memory_budget, with_margin(self.config))
        except InfeasibleBudgetError as error:
            self.shape_policies.least = error.least
            raise

    def _refuse_far_above(self, profile: Profile, budget: Budget) -> None:
        """Raise InfeasibleBudgetError if the policy of least memory that another size has takes far more than `budget`.

        To find that of this size takes the solver up to seconds, and it would differ little.
        """
        known = self.shape_policies.least
        if self.config.on_over_budget == "error":  # the run ends: the solver is to have the last word
            return
        if known is None or not _is_for(known, profile) or over_bound(profile, known, self.config):
            return
        least = current_policy(profile, known)
        needed = needed_bytes(least, budget)
        if needed > (1 + FAR_ABOVE) * budget.nbytes:
            what = "peak" if budget.of_peak else "stored bytes"
            message = f"memory_budget={budget.given!r} is below {needed} bytes, the least {what} that is known"
            raise InfeasibleBudgetError(message, needed, bound_bytes=0, least=least)

    def _with_room(self, profile: Profile) -> str | float | int:
        """The budget for batches whose `profile` is told: a smaller one where peaks are not told exactly."""
        budget = Budget.resolve(self.memory_budget, profile, self.config)
        uncertainty = self._uncertainty
        return int(budget.nbytes / (1 + uncertainty)) if budget.of_peak and uncertainty else self.memory_budget

    @property
    def _uncertainty(self) -> float:
        return self.shape_policies.told_from()[1].uncertainty

    def _say_doubt(self, sizes: BatchShapes, policy: Policy) -> None:
        """Say that batches of these sizes may take more than the budget, which has no room for what is not known."""
        text = (
            f"batches of {describe(sizes)} may take more than memory_budget={self.memory_budget!r}: what they need is "
            f"told to {self._uncertainty:.0%} ({policy.predicted_peak_bytes} bytes)"
        )
        log.warning("Adacc: %s", text)
        self.say(text)

    def _largest_fitting(self, sizes: BatchShapes, least: Policy) -> BatchShapes | None:
        """The largest class of batches of fewer tokens than `sizes` at which the policy `least` keeps to the budget."""
        length = max(shape.size[1] for shape in sizes if len(shape.size) > 1) if any(s.size[1:] for s in sizes) else 0
        for shorter in sorted({int(length / STEP**k) for k in range(1, 16)} - {0}, reverse=True):
            cut = tuple(
                replace(s, size=tuple(max(1, n * shorter // length) if d == 1 else n for d, n in enumerate(s.size)))
                for s in sizes
            )
            known = self.shape_policies.class_of(cut)
            if known is None:
                return None
            profile = self.profile_at(known)
            if not over_bound(profile, least, self.config) and not Replanner(
                profile, least, self.config, self.memory_budget
            ).is_over_budget(current_policy(profile, least).predicted_peak_bytes):
                return known
        return None


def _is_for(policy: Policy, profile: Profile) -> bool:
    """Whether the policy was made for blocks that run what the profile has: those of a batch of one may not."""
    return all(policy.plan_of(block.name).kind == profile.kinds[block.kind].digest for block in profile.blocks)
