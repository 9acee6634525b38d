"""Policy solver (paper, section 3.3): the fastest policy within a memory budget.

First, `frontiers` computes the frontier of plans of each kind of block, once for all budgets. For one kind and a budget
on stored bytes, one integer program (`MixtureProgram`) gives the policy. For several kinds, or a budget on the peak of
the step, the solver walks along a `chain` of policies, each of which stores fewer bytes than the previous one. It takes
the first policy that fits, and refines this policy with the same program.

The frontiers also give a lower bound on the time of any policy. The relative distance of the solver's policy from this
bound is the policy's `gap`. At the end every policy is simulated, in whole bytes, by code that is independent of the
program.

If the fastest policy stores more in host memory than allowed, the limit is divided among the blocks: each block's
program contains a bound on its bytes in host memory. The candidates divide the limit among all blocks, among half of
the blocks, among a quarter, and so on. The lower bound on the time is then computed without a limit on host memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from adacc_hf.artifacts.config import AdaccConfig, Budget
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.policy import Action, Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.setting_checks import check_type, settings_in_config
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.solve.kinds import Kinds
from adacc_hf.solve.milp import PricedPlan
from adacc_hf.solve.search import PolicySearch
from adacc_hf.solve.simple_policies import checkpoint_policy, policy_of_plans, uniform_policy
from adacc_hf.solve.tiling import tiled_profiles, with_fewest_tiles

FAR = 0.1
"""Relative distance of a peak from the budget above which `least_peak_bytes` returns an estimate.

The search for the least peak lowers the estimate by a few percent. Nearer to the budget, an estimate could therefore be
on the other side of the budget than the least peak."""


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
    # If the budget does not limit the peak, tiles are of no use: recomputation lowers the stored bytes at less cost.
    profiles = tiled_profiles(profile, config if budget.limits_peak else config.for_rows(0))
    searches = _searches(profiles, config)
    host_limit = config.host_limit(profile.host_free_bytes)
    search, plans = _fastest_within_host(profiles, config, searches, budget, host_limit)
    gap = _gap(searches, search.rank(plans)[0], budget)
    facts = {
        "memory_budget": budget.setting,
        "budget_bytes": budget.nbytes,
        "budget_of": "peak" if budget.limits_peak else "stored",
        "plain_stored_bytes": profile.plain_stored_bytes,
        **({} if config.host_memory is None else {"host_limit_bytes": host_limit}),
        "status": "plain" if plans is searches[0].plain else "optimal" if gap == 0.0 else "feasible",
        "gap": gap,
        "solves": search.log.num_solves,
        "seconds": time.perf_counter() - start,
    }
    block_plans, final_profile = [priced_plan.plan for priced_plan in plans], search.profile
    if budget.limits_peak:
        final_profile, block_plans = with_fewest_tiles(search.profile, block_plans, budget.nbytes)
    policy = policy_of_plans(final_profile, block_plans, facts)
    needed_bytes = budget.needed_bytes(policy)
    assert needed_bytes <= budget.nbytes, (
        f"the solver's policy needs {needed_bytes} bytes, more than the budget of {budget.nbytes}"
    )
    assert policy.predicted_host_bytes <= host_limit, (
        f"the solver's policy stores {policy.predicted_host_bytes} bytes in host memory, more than {host_limit}"
    )
    return policy


def least_policy(profile: Profile, config: AdaccConfig | None = None) -> Policy:
    """Return the fastest policy among those with the lowest peak that the solver finds."""
    return solve_policy(profile, quick_least_policy(profile, config).predicted_peak_bytes, config)


def quick_least_policy(profile: Profile, config: AdaccConfig | None = None) -> Policy:
    """Return a policy with the same peak as `least_policy`, in half the solver time. Training steps may be slower."""
    return _within_or_least(profile, 1, config)


def least_peak_bytes(profile: Profile, budget_bytes: int, config: AdaccConfig | None = None) -> int:
    """Return the peak of `least_policy`, or an estimate of this peak, for a comparison with `budget_bytes`.

    The result is always on the same side of the budget as the least peak. A result far from the budget is an estimate,
    because the search for the least peak takes seconds. Heads (output layer and loss) and numbers of tiles are searched
    one after the other, the most promising first. The search ends with the first peak within the budget. Heads and
    numbers of tiles with a lower bound above the budget are skipped.
    """
    config = config or AdaccConfig()
    if config.host_memory is not None:
        return quick_least_policy(profile, config).predicted_peak_bytes
    budget = Budget(budget_bytes, budget_bytes, limits_peak=True)
    profiles = tiled_profiles(profile, config)
    searches = sorted(_searches(profiles, config), key=lambda search: search.quick_peak_bytes)
    least = searches[0].quick_peak_bytes
    if least <= (1 - FAR) * budget_bytes:
        return least
    bounds = [search.least_bytes_bound(budget) for search in searches]
    if least > (1 + FAR) * budget_bytes and min(bounds) > budget_bytes:
        return least
    for bound, search in zip(bounds, searches, strict=True):
        if bound <= budget_bytes:
            least = min(least, search.least_peak_bytes)
        if least <= budget_bytes:
            break
    return least


def provisional_policy(profile: Profile, nbytes: int, config: AdaccConfig | None = None) -> Policy:
    """Return a policy for the first steps of a run, with a peak of at most `nbytes` if possible.

    The policy is provisional: it is replaced once the memory of a step has been measured during the run. If a policy
    that recomputes every block (`recomputing_policies`) fits, return this policy. The solver then does not run, and the
    function takes only milliseconds. If no policy fits, return a policy with the lowest peak that the solver finds.
    """
    config = config or AdaccConfig()
    policies = recomputing_policies(profile, config)
    policy = min(policies, key=lambda policy: policy.predicted_peak_bytes, default=None)
    if policy is not None and policy.predicted_peak_bytes <= nbytes:
        return policy
    return replace(_within_or_least(profile, nbytes, config), facts=())  # `nbytes` is not the run's budget


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


def _within_or_least(profile: Profile, nbytes: int, config: AdaccConfig | None) -> Policy:
    """Return the fastest policy whose peak is at most `nbytes`. If no policy fits, return a policy with the lowest peak
    that the solver finds."""
    try:
        return solve_policy(profile, nbytes, config)
    except InfeasibleBudgetError as error:
        least = error.least
    assert least is not None  # errors that the solver raises have this policy
    return least


def _searches(profiles: Sequence[Profile], config: AdaccConfig) -> list[PolicySearch]:
    """Return a search for each pair of a profile and a head that the config allows. `profiles` come from
    `tiled_profiles`. The first search is for blocks without tiles (groups of rows), and for the plain head (output
    layer and loss)."""
    heads = [name for name in config.heads if name in profiles[0].heads] or config.heads[:1]
    every_kind: list[Kinds] = []
    for profile in profiles:
        every_kind.append(Kinds.of(profile, config, every_kind))
    pairs = list(zip(profiles, every_kind, strict=True))
    return [PolicySearch(profile.with_head(name), config, kinds) for profile, kinds in pairs for name in heads]


def _fastest_within_host(
    profiles: Sequence[Profile], config: AdaccConfig, searches: Sequence[PolicySearch], budget: Budget, host_limit: int
) -> tuple[PolicySearch, list[PricedPlan]]:
    """Return (search, plans) of the fastest policy within the budget that also keeps a limit on host memory. The policy
    stores at most `host_limit` bytes in host memory. `searches` have no limit on host memory. Raises
    InfeasibleBudgetError if no policy fits."""
    if config.host_memory is None or all(kind.host_link is None for kind in profiles[0].kinds):
        return _fastest(searches, budget)
    # Neither search is exact: the one without host memory may find a faster policy. Host memory never costs time.
    without_host = _searches([profile.with_host_memory(0, 0) for profile in profiles], config)
    bound = min(search.least_bytes_bound(budget) for search in searches)
    try:
        search, plans = _fastest([*searches, *without_host], budget, bound)
        if sum(plan.host_bytes for plan in plans) <= host_limit:
            return search, plans
    except InfeasibleBudgetError as error:
        if error.least is not None and error.least.predicted_host_bytes <= host_limit:
            raise
    num_blocks = len(profiles[0].blocks)
    limited_searches = []
    for number in (num_blocks >> halvings for halvings in range(num_blocks.bit_length())):
        limited = [profile.with_host_memory(number, host_limit) for profile in profiles]
        movable = list(filter(_may_move, limited))
        limited_searches += _searches(movable, config) if movable else []
    return _fastest([*without_host, *limited_searches], budget, bound)


def _may_move(profile: Profile) -> bool:
    """Return True if a block may store some payload in host memory within its limit."""
    return any(
        0 < option.host_bytes <= (kind.host_link.limit_bytes or 0)
        for kind in profile.kinds
        if kind.host_link is not None
        for value in kind.activations
        for option in kind.codec_options(value.index)
    )


def _fastest(
    searches: Sequence[PolicySearch], budget: Budget, bound_bytes: int | None = None
) -> tuple[PolicySearch, list[PricedPlan]]:
    """Return (search, plans) of the fastest policy within the budget. Each of `searches` covers the policies with one
    head (output layer and loss), and possibly with one limit on the host memory of each block. Raises
    InfeasibleBudgetError if no policy fits. The error reports `bound_bytes`, a lower bound on the budget that any
    policy needs. If `bound_bytes` is None, the lowest bound of the searches is reported."""
    candidates: list[tuple[PolicySearch, list[PricedPlan]]] = []
    errors: list[InfeasibleBudgetError] = []
    for search in sorted(searches, key=lambda search: search.fixed_ms):
        incumbent_ms = min((other.rank(plans)[0] for other, plans in candidates), default=math.inf)
        # Compare the fixed time first: the bound needs the blocks' frontiers, which may not be needed otherwise.
        if candidates and (search.fixed_ms >= incumbent_ms or search.bound_ms(budget) >= incumbent_ms):
            continue
        try:
            plans = search.within(budget, incumbent_ms)
        except InfeasibleBudgetError as error:
            # Without the traceback, whose frames would keep all tensors of a step alive.
            errors.append(error.with_traceback(None))
            continue
        if plans is not None:
            candidates.append((search, plans))
    if not candidates:
        raise _with_bound(errors, bound_bytes)
    return min(candidates, key=lambda pair: pair[0].rank(pair[1]))


def _with_bound(errors: Sequence[InfeasibleBudgetError], bound_bytes: int | None) -> InfeasibleBudgetError:
    """Return an error that reports the lowest feasible budget in `errors`, and a lower bound on all feasible budgets.
    The lower bound is `bound_bytes` or, if this is None, the lowest bound in `errors`."""
    least = min(errors, key=lambda error: error.smallest_budget_bytes)
    bounds = [error.bound_bytes for error in errors]
    floor, bound = least.smallest_budget_bytes, min(bounds) if bound_bytes is None else bound_bytes
    if bound >= floor:
        return InfeasibleBudgetError(str(least), floor, least=least.least)
    return InfeasibleBudgetError(
        f"{least}. This is the least of all policies that were tried; no policy needs less than {bound} bytes "
        f"({format_bytes(bound)})",
        floor,
        bound,
        least.least,
    )


def _gap(searches: Sequence[PolicySearch], ms: float, budget: Budget) -> float:
    """Return the optimality gap of a policy with the overhead `ms`: the largest fraction of this overhead that another
    policy might avoid. The overhead is counted from the time of the fastest head (output layer and loss)."""
    fastest_ms = min(0.0, *(search.head_ms for search in searches))
    if ms <= fastest_ms:
        return 0.0
    bound_ms = min(search.bound_ms(budget) for search in searches)
    return max(0.0, (ms - bound_ms) / (ms - fastest_ms))
