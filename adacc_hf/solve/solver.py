"""The policy maker (paper, section 3.3): the fastest policy within a memory budget.

How it goes: `frontiers` finds for each kind of block the plans worth mixing, once for all budgets. With one kind, a
budget on stored bytes is then one integer program (`MixtureProgram`). A budget on the peak of the step, or for several
kinds, is met by the first policy of the `chain` from all RETAIN to the least bytes that fits, refined with the same
program. The frontiers also bound what any policy can do: how far the best one found may lie above that is its `gap`.
Every policy is simulated at the end, in whole bytes, by code that shares nothing with the program.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from adacc_hf.artifacts.config import AdaccConfig, Budget
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.solve.milp import PricedPlan
from adacc_hf.solve.search import Kinds, PolicySearch
from adacc_hf.solve.simple_policies import policy_of_plans

if TYPE_CHECKING:
    from adacc_hf.artifacts.profile import Profile


def solve_policy(
    profile: Profile, memory_budget: str | float | int | None = None, config: AdaccConfig | None = None
) -> Policy:
    """The fastest policy whose memory keeps to `memory_budget` (default: the config's).

    All RETAIN with the fastest head if that fits. Raises InfeasibleBudgetError, with the smallest budget that would do,
    if nothing fits, and ValueError for a budget in no known form, or if the profile has no head that the config allows.
    """
    started = time.perf_counter()
    config = config or AdaccConfig()
    budget = Budget.resolve(config.memory_budget if memory_budget is None else memory_budget, profile, config)
    searches = _searches(profile, config)
    search, columns = _fastest(searches, budget)
    gap = _gap(searches, search.rank(columns)[0], budget)
    facts = {
        "memory_budget": budget.given,
        "budget_bytes": budget.nbytes,
        "budget_of": "peak" if budget.of_peak else "stored",
        "status": "plain" if columns is searches[0].plain else "optimal" if gap <= config.solver_gap else "feasible",
        "gap": gap,
        "solves": search.log.num_solves,
        "seconds": time.perf_counter() - started,
    }
    policy = policy_of_plans(search.profile, [column.plan for column in columns], facts)
    needed = policy.predicted_peak_bytes if budget.of_peak else policy.predicted_stored_bytes
    assert needed <= budget.nbytes, f"the solver's policy needs {needed} bytes of {budget.nbytes}"
    return policy


def least_policy(profile: Profile, config: AdaccConfig | None = None) -> Policy:
    """The policy with the least peak of all that are tried."""
    return solve_policy(profile, quick_least_policy(profile, config).predicted_peak_bytes, config)


def quick_least_policy(profile: Profile, config: AdaccConfig | None = None) -> Policy:
    """Return a policy with the peak of `least_policy`, found in half the time. The latter may be faster."""
    try:
        return solve_policy(profile, 1, config)
    except InfeasibleBudgetError as error:
        least = error.least
    assert least is not None  # the solver's errors have it
    return least


def _searches(profile: Profile, config: AdaccConfig) -> list[PolicySearch]:
    """A search for each head that may be chosen, the plain one first."""
    heads = [name for name in config.heads if name in profile.heads] or config.heads[:1]
    kinds = Kinds(profile, config)
    return [PolicySearch(profile.with_head(name), config, kinds) for name in heads]


def _fastest(searches: Sequence[PolicySearch], budget: Budget) -> tuple[PolicySearch, list[PricedPlan]]:
    """The fastest policy within the budget, with the search that found it. Raises InfeasibleBudgetError."""
    found: list[tuple[PolicySearch, list[PricedPlan]]] = []
    errors: list[InfeasibleBudgetError] = []
    for search in sorted(searches, key=lambda search: search.head_ms):
        incumbent_ms = min((other.rank(columns)[0] for other, columns in found), default=math.inf)
        # The head alone first: the bound takes the blocks' frontiers, which nothing else may need.
        if found and (search.head_ms >= incumbent_ms or search.bound_ms(budget) >= incumbent_ms):
            continue
        try:
            columns = search.within(budget, incumbent_ms)
        except InfeasibleBudgetError as error:
            # Without its frames: they hold this list, and through their callers a whole step's tensors.
            errors.append(error.with_traceback(None))
            continue
        if columns is not None:
            found.append((search, columns))
    if not found:
        raise _with_bound(errors)
    return min(found, key=lambda pair: pair[0].rank(pair[1]))


def _with_bound(errors: Sequence[InfeasibleBudgetError]) -> InfeasibleBudgetError:
    """The error of the head with the lowest floor, and how far below it any policy with any head may come."""
    least = min(errors, key=lambda error: error.smallest_budget_bytes)
    floor, bound = least.smallest_budget_bytes, min(error.bound_bytes for error in errors)
    if bound >= floor:
        return InfeasibleBudgetError(str(least), floor, least=least.least)
    percent = 100 * (1 - bound / floor)
    return InfeasibleBudgetError(
        f"{least}. It is the least of all policies that were tried; no policy needs less than {bound} bytes "
        f"({format_bytes(bound)}, {percent:.2g} % below)",
        floor,
        bound,
        least.least,
    )


def _gap(searches: Sequence[PolicySearch], ms: float, budget: Budget) -> float:
    """Part of a policy's overhead by which the best policy within the budget, with any head, may be faster.

    Overhead counts from the fastest head, which may be faster than the plain one.
    """
    fastest_ms = min(0.0, *(search.head_ms for search in searches))
    if ms <= fastest_ms:
        return 0.0
    bound_ms = min(search.bound_ms(budget) for search in searches)
    return max(0.0, (ms - bound_ms) / (ms - fastest_ms))
