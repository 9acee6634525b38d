"""Whether another policy is worth following at today's prices, and which codecs degrade a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from adacc_hf.adapt.outlier_tracking import full_name
from adacc_hf.adapt.profile_updates import repriced_choice
from adacc_hf.artifacts.config import AdaccConfig, Budget
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.exact_recompute_rules import DEGRADED_ERROR
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import CodecOption, KindProfile
from adacc_hf.solve.simple_policies import policy_of_plans
from adacc_hf.solve.solver import solve_policy

if TYPE_CHECKING:
    from adacc_hf.artifacts.profile import Profile

MIN_GAIN = 0.02
"""A new policy is taken over if it saves this share of the overhead, or if the old one no longer keeps to the budget.
Prices vary by a few percent from one profile to the next; a smaller gain is noise."""

MIN_FREED = 0.01
"""The solver runs again once codecs have freed this share of what the policy stores since it last ran, or the policy
no longer keeps to its bounds. The overhead falls by one to three times the share by which memory grows, so less than
this gains no MIN_GAIN; and a run takes as long as some steps of a small model."""

HEADROOM = 0.005
"""The part of the budget that policies made in mid-run leave free, where that can be: channels come and go by ones and
twos, and a budget filled to the brim would be burst, and the solver asked, at each that comes."""

ERROR_MARGIN = 0.05
"""The part of `max_error` that new policies leave free: errors drift by a few percent between tracking steps."""

NOTHING_FITS = "no policy fits any more"
"""How the reason begins where no policy keeps to the budget at today's prices."""

SAME_ACTIONS = "the same actions, with the channels there are now"


@dataclass(frozen=True, kw_only=True)
class ReplanResult:
    """What came of solving again."""

    policy: Policy | None
    """A better policy, or None to keep the one in force."""
    reason: str
    searched: bool
    """Whether the solver ran."""


def judged(
    profile: Profile, policy: Policy, memory_budget: str | float | int, config: AdaccConfig, searched: Profile
) -> ReplanResult:
    """The policy to follow from now on, and why: a new one, or today's actions with as many channels as were found.

    `searched` are the prices for which the solver ran last.
    """
    over = over_bound(profile, policy, config)
    current = None if over else current_policy(profile, policy)
    reason: str | None = f"must not be compressed as before: {', '.join(over)}"
    if current is not None:
        reason = _no_room(current, Budget.resolve(memory_budget, profile, config))
        freed = freed_bytes(searched, profile, config)
        if reason is None and freed < MIN_FREED * current.predicted_stored_bytes:
            return _rectified(policy, current, SAME_ACTIONS, searched=False)
    try:
        candidate = _solved(profile, memory_budget, with_margin(config))
    except InfeasibleBudgetError as error:
        if not over or not isinstance(memory_budget, float):
            return ReplanResult(policy=None, reason=f"{NOTHING_FITS}, the policy stays: {error}", searched=True)
        # Beyond a fraction there is memory, perhaps. Beyond the error there is no training.
        least = solve_policy(profile, error.smallest_budget_bytes / profile.plain_stored_bytes, with_margin(config))
        return _rectified(
            policy, least, f"{reason}; {NOTHING_FITS}, what stores least is taken: {error}", searched=True
        )
    if reason is None:
        assert current is not None
        gain = current.predicted_overhead_ms - candidate.predicted_overhead_ms
        # What a faster head saves is no part of it: prices of the blocks are what varies.
        now_ms = current.predicted_overhead_ms - min(0.0, profile.with_head(current.head).head_overhead_ms)
        if gain <= MIN_GAIN * now_ms:
            return _rectified(policy, current, SAME_ACTIONS, searched=True)
        reason = f"{gain:.2f} ms of {now_ms:.2f} ms overhead gained"
    return _rectified(policy, candidate, reason, searched=True)


def _solved(profile: Profile, memory_budget: str | float | int, config: AdaccConfig) -> Policy:
    """The solver's policy, with headroom if there is one. Raises InfeasibleBudgetError if there is none at all."""
    budget = Budget.resolve(memory_budget, profile, config)
    part = 1 - HEADROOM
    less = memory_budget * part if isinstance(memory_budget, float) else int(budget.nbytes * part)
    try:
        policy = solve_policy(profile, less, config)
    except InfeasibleBudgetError:
        return solve_policy(profile, memory_budget, config)
    given = {"memory_budget": memory_budget, "budget_bytes": budget.nbytes}
    return replace(policy, facts=tuple((dict(policy.facts) | given).items()))


def _rectified(policy: Policy, chosen: Policy, reason: str, searched: bool) -> ReplanResult:
    is_same = (chosen.plans, chosen.blocks, chosen.head) == (policy.plans, policy.blocks, policy.head)
    return ReplanResult(policy=None if is_same else chosen, reason=reason, searched=searched)


def needed_bytes(policy: Policy, budget: Budget) -> int:
    """What of `policy` the budget bounds."""
    return policy.predicted_peak_bytes if budget.of_peak else policy.predicted_stored_bytes


def _no_room(current: Policy, budget: Budget) -> str | None:
    """Why `current` cannot stay within the budget; None if it can."""
    needed = needed_bytes(current, budget)
    if needed <= budget.nbytes:
        return None
    return f"more memory: the old actions would need {needed} of {budget.nbytes} bytes"


def with_margin(config: AdaccConfig) -> AdaccConfig:
    """`config` with the bound on errors that new policies keep to."""
    bound = bound_of(config)
    return config if bound is None else config.with_overrides(max_error=bound)


def bound_of(config: AdaccConfig) -> float | None:
    """Largest error that a new policy may have; None if there is no bound."""
    return None if config.max_error is None else config.max_error * (1 - ERROR_MARGIN)


def gradient_bound(config: AdaccConfig) -> float:
    """Largest error that a sampled block's gradient may have."""
    bound = bound_of(config)
    return DEGRADED_ERROR if bound is None else min(bound, DEGRADED_ERROR)


def freed_bytes(before: Profile, after: Profile, config: AdaccConfig) -> int:
    """The most by which any policy could store less at the prices of `after` than at those of `before`."""
    bound = bound_of(config)
    kinds = [_freed_in_kind(b, a, bound) for b, a in zip(before.kinds, after.kinds, strict=True)]
    return sum(kinds[block.kind] for block in after.blocks)


def _freed_in_kind(before: KindProfile, after: KindProfile, bound: float | None) -> int:
    freed = 0
    for old, new in zip(before.values, after.values, strict=True):
        was = {option.codec: option.nbytes for option in old.codecs if _keeps_to(option, bound)}
        allowed = (option for option in new.codecs if _keeps_to(option, bound))
        freed += max([0, *(was.get(option.codec, old.nbytes) - option.nbytes for option in allowed)])
    return freed


def _keeps_to(option: CodecOption, bound: float | None) -> bool:
    return bound is None or option.error <= bound


def current_policy(profile: Profile, policy: Policy) -> Policy:
    """The actions in force, with today's outlier channels and prices."""
    plans = []
    for block in profile.blocks:
        kind = profile.kinds[block.kind]
        plan = policy.plan_of(block.name)
        choices = tuple((v, repriced_choice(kind, v, choice)) for v, choice in plan.choices)
        plans.append(replace(plan, choices=choices))
    return policy_of_plans(profile.with_head(policy.head), plans, dict(policy.facts))


def over_bound(profile: Profile, policy: Policy, config: AdaccConfig) -> list[str]:
    """Activations whose codec `profile` no longer offers, or whose error exceeds what new policies may have."""
    bound = bound_of(config)
    found: dict[str, None] = {}
    for block in profile.blocks:
        options = {value.index: value.codecs for value in profile.kinds[block.kind].values}
        for value, choice in policy.plan_of(block.name).choices:
            if choice.codec is not None and not _may_use(options[value], choice.codec, bound):
                found[full_name(profile, (block.kind, value))] = None
    return list(found)


def _may_use(options: tuple[CodecOption, ...], codec: str, bound: float | None) -> bool:
    option = next((option for option in options if option.codec == codec), None)
    return option is not None and _keeps_to(option, bound)


# What degrades a gradient: the fewest activations without whose compression it keeps to its bound.
#
# Round trips do not tell. Queries and keys come back as exact as anything else, and where backward makes attention's
# softmax of them again, the gradient may be off by more than its length.


def fewest(
    lossy: Iterable[int], bound: float, error_without: Callable[[frozenset[int]], float | None]
) -> frozenset[int] | None:
    """Activations among `lossy` of which none can be compressed again beside the others within `bound`.

    `error_without` gives the gradient's error with some activations kept as they are, or None if that cannot be known;
    it is asked at most twice for each of `lossy`, and once more. None if it gives None, or if the error is above the
    bound with all of them kept.

    At first each activation is compressed alone; then one after the other on top of those that are, the least harmful
    first. So activations that degrade the gradient each by itself are found however many they are, and of those that
    degrade it only together no more than it takes.
    """
    everything = kept = frozenset(lossy)
    alone: dict[int, float] = {}
    for value in sorted(everything):
        error = error_without(everything - {value})
        if error is None:
            return None
        alone[value] = error
    for value in sorted((value for value in alone if alone[value] <= bound), key=alone.__getitem__):
        error = error_without(kept - {value})
        if error is None:
            return None
        kept -= {value} if error <= bound else set()
    if kept == everything:
        error = error_without(everything)
        if error is None or not error <= bound:
            return None
    return kept
