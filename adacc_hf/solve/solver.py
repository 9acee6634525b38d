"""Policy solver (paper, section 3.3): the fastest policy within a memory budget.

First, each kind of block gets a pool of plans (`PlanPools`): mainly its frontier, from an integer program. Then
`PolicySearch` gives each block one of these plans, such that the step fits the budget in the least time. It refines the
policy with further plans of the same program, and repeats this for each output head.

The frontiers also give a lower bound on the time of any policy. The relative distance of the solver's policy from this
bound is the policy's `gap`. At the end every policy is simulated, in whole bytes, by code that is independent of the
program. The lower bound on the time is computed without a limit on host memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from adacc_hf.artifacts.budget_values import budget_hint
from adacc_hf.artifacts.config import AdaccConfig, Budget
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.memory_simulator import simulate_policy
from adacc_hf.artifacts.policy import Action, Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.setting_checks import check_type, settings_in_config
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.solve.plan_pools import PlanPools
from adacc_hf.solve.search import Limits, PolicySearch
from adacc_hf.solve.simple_policies import checkpoint_policy, uniform_policy


@settings_in_config(AdaccConfig)
def solve_policy(
    profile: Profile, memory_budget: str | float | int | None = None, config: AdaccConfig | None = None
) -> Policy:
    """Return the fastest policy within `memory_budget` (default: the config's).

    If all activations fit, the policy retains all of them, with the fastest head. Raises InfeasibleBudgetError, with
    the smallest feasible budget, if no policy fits. Raises ValueError if the format of the budget is unknown, or if the
    profile has no head that the config allows.
    """
    advice = "pass the result of profile_model(model, batch), or of Profile.load"
    check_type("solve_policy: profile", profile, Profile, advice)
    start = time.perf_counter()
    if isinstance(memory_budget, AdaccConfig):
        raise TypeError("solve_policy: memory_budget is an AdaccConfig: write solve_policy(profile, config=...)")
    config = config or AdaccConfig()
    budget = Budget.resolve(config.memory_budget if memory_budget is None else memory_budget, profile, config)
    host_limit = config.host_limit(profile.host_free_bytes)
    searches = _searches(profile, config, Limits(budget, host_limit))
    policy = _fastest(searches, config, Limits(budget, host_limit))
    gap = _gap(searches, policy.predicted_overhead_ms, budget)
    facts = {
        "memory_budget": budget.setting,
        "budget_bytes": budget.nbytes,
        "budget_of": "peak" if budget.limits_peak else "stored",
        "plain_stored_bytes": profile.plain_stored_bytes,
        **({} if config.host_memory is None else {"host_limit_bytes": host_limit}),
        "status": "plain" if policy.is_plain else "optimal" if gap == 0.0 else "feasible",
        "gap": gap,
        "seconds": time.perf_counter() - start,
    }
    policy = replace(policy, facts=tuple(facts.items()))
    needed_bytes = budget.needed_bytes(policy)
    assert needed_bytes <= budget.nbytes, (
        f"the solver's policy needs {needed_bytes} bytes, more than the budget of {budget.nbytes}"
    )
    assert policy.predicted_host_bytes <= host_limit, (
        f"the solver's policy stores {policy.predicted_host_bytes} bytes in host memory, more than {host_limit}"
    )
    return policy


def least_policy(profile: Profile, config: AdaccConfig | None = None) -> Policy:
    """Return the fastest policy found among those with the lowest peak that the solver finds."""
    return solve_policy(profile, quick_least_policy(profile, config).predicted_peak_bytes, config)


def quick_least_policy(profile: Profile, config: AdaccConfig | None = None) -> Policy:
    """Return a policy with the lowest peak that the solver finds. `least_policy` may be faster."""
    config = config or AdaccConfig()
    limits = Limits(Budget(1, 1, limits_peak=True), config.host_limit(profile.host_free_bytes))
    return _least(_searches(profile, config, limits), limits)


def recomputing_policies(profile: Profile, config: AdaccConfig) -> list[Policy]:
    """Return the policies that recompute each block, by replay or by torch's checkpoint.

    There is one pair of policies for each head that `config` allows. Return an empty list if `config` does not allow
    recomputation.
    """
    policies: list[Policy] = []
    for name in config.heads if "recompute" in config.actions else ():
        if name in profile.heads:
            with_head = profile.with_head(name)
            policies += [checkpoint_policy(with_head), uniform_policy(with_head, Action.RECOMPUTE)]
    return policies


def _searches(profile: Profile, config: AdaccConfig, limits: Limits) -> list[PolicySearch]:
    """Return a search for each head (output layer and loss) that the config allows, the plain head first."""
    heads = [name for name in config.heads if name in profile.heads] or config.heads[:1]
    pools = PlanPools(profile, config, limits_peak=limits.budget.limits_peak, host_limit=limits.host_bytes)
    return [PolicySearch(profile.with_head(name), pools) for name in heads]


def _fastest(searches: Sequence[PolicySearch], config: AdaccConfig, limits: Limits) -> Policy:
    """Return the fastest policy found within `limits`. Raises InfeasibleBudgetError if no policy fits."""
    budget, best, is_timed = limits.budget, None, False
    most_ms = math.inf
    for search in sorted(searches, key=lambda search: search.head_ms):
        if search.head_ms >= most_ms:
            break
        plain = uniform_policy(search.profile, Action.RETAIN)
        if budget.needed_bytes(plain) <= budget.nbytes:
            best, most_ms, is_timed = plain, search.head_ms, False
            continue
        found = search.within(limits, most_ms)
        if found is not None and search.ms(found) < most_ms:
            best, most_ms, is_timed = search.policy_of(found), search.ms(found), True
    # A policy that fits only with the measured times would not fit in another process.
    if best is None or (is_timed and not any(search.fitting(limits) for search in searches)):
        bound = min(each.bound_bytes(budget) for each in searches)
        raise infeasible_budget(searches[0].profile, config, budget, _least(searches, limits), bound)
    return best


def _least(searches: Sequence[PolicySearch], limits: Limits) -> Policy:
    """Return the policy that needs the fewest bytes."""
    best: Policy | None = None
    for search in searches:
        most = [] if best is None else [limits.budget.needed_bytes(best) - 1]
        best = search.least(limits.budget, limits.host_bytes, *most) or best
    assert best is not None, "RETAIN for all activations is a policy without a budget"
    return best


def _gap(searches: Sequence[PolicySearch], ms: float, budget: Budget) -> float:
    """Return the optimality gap of a policy with the overhead `ms`: the largest fraction of this overhead that another
    policy might avoid. The overhead is counted from the time of the fastest head (output layer and loss)."""
    fastest_ms = min(0.0, *(search.head_ms for search in searches))
    if ms <= fastest_ms:
        return 0.0
    bound_ms = min(search.bound_ms(budget) for search in searches)
    return max(0.0, (ms - bound_ms) / (ms - fastest_ms))


# The error for a budget that no policy fits.


def infeasible_budget(
    profile: Profile, config: AdaccConfig, budget: Budget, least: Policy, bound: int
) -> InfeasibleBudgetError:
    """Return the error for a budget below the bytes that `least` needs, the policy with the least memory.

    `bound` is a lower bound on the bytes that any policy needs.
    """
    profile, needed = profile.with_head(least.head), budget.needed_bytes(least)
    text = (
        _peak_text(profile, config, budget, least)
        if budget.limits_peak
        else _stored_text(profile, config, budget, least)
    )
    if bound < needed:
        text += (
            f". This is the least of all policies that were tried; no policy needs less than {bound} bytes "
            f"({format_bytes(bound)})"
        )
    return InfeasibleBudgetError(text, needed, min(bound, needed), least)


def _stored_text(profile: Profile, config: AdaccConfig, budget: Budget, least: Policy) -> str:
    floor, plain = least.predicted_stored_bytes, profile.plain_stored_bytes
    fraction = math.ceil(floor / plain * 1e4) / 1e4
    outside = profile.outside_stored_bytes + sum(shared.nbytes for shared in profile.shared if shared.saved)
    return (
        f"memory_budget={budget.setting!r} allows {format_bytes(budget.nbytes)} of the {format_bytes(plain)} that "
        f"plain training stores for backward, but the least possible is {floor} bytes ({format_bytes(floor)}), a "
        f"fraction of {fraction:.4f}: {format_bytes(outside)} are stored outside the blocks ({profile.head} head) and "
        f"{format_bytes(floor - outside)} by the blocks with {config.describe_actions()}. Raise memory_budget, allow "
        f"more actions or codecs, or use a smaller batch"
    )


def _peak_text(profile: Profile, config: AdaccConfig, budget: Budget, least: Policy) -> str:
    outcome = simulate_policy(profile, least)
    needed = outcome.peak_bytes
    hint = f"{text}," if (text := budget_hint(budget.nbytes)) else ""
    origin = f" ({budget.nbytes} bytes)" if isinstance(budget.setting, str) else ""
    return (
        f"memory_budget={budget.setting!r}{origin}{hint} is below the least possible peak of {needed} bytes "
        f"({format_bytes(needed)}), reached in {outcome.peak_label!r} with {config.describe_actions()} and a "
        f"{profile.head} head: {format_bytes(profile.static_bytes)} are live before a forward (parameters, optimizer "
        f"state, batches), and at least {format_bytes(outcome.stored_bytes)} are stored for backward. Raise "
        f"memory_budget, allow more actions or codecs, or use a smaller batch or shorter sequences"
    )
