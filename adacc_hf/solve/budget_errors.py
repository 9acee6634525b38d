"""Errors for budgets that no policy fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from adacc_hf.artifacts.budget_values import budget_hint
from adacc_hf.artifacts.config import AdaccConfig, Budget
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.memory_simulator import simulate
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.solve.frontier import fixed_bytes
from adacc_hf.solve.simple_policies import policy_of_plans

if TYPE_CHECKING:
    from adacc_hf.artifacts.profile import Profile
    from adacc_hf.solve.milp import PricedPlan


def infeasible_stored(
    profile: Profile, config: AdaccConfig, budget: Budget, least: Sequence[PricedPlan], floor: int, plain: int
) -> InfeasibleBudgetError:
    """Return the error for a budget below `floor`, the bytes that the policy `least` stores: no policy stores fewer."""
    fraction = math.ceil(floor / plain * 1e4) / 1e4
    outside = fixed_bytes(profile)
    return InfeasibleBudgetError(
        f"memory_budget={budget.setting!r} allows {format_bytes(budget.nbytes)} of the {format_bytes(plain)} that "
        f"plain training stores for backward, but the least possible is {floor} bytes ({format_bytes(floor)}), a "
        f"fraction of {fraction:.4f}: {format_bytes(outside)} are stored outside the blocks ({profile.head} head) and "
        f"{format_bytes(floor - outside)} by the blocks with {config.describe_actions()}. Raise memory_budget, allow "
        f"more actions or codecs, or use a smaller batch",
        floor,
        least=policy_of_plans(profile, [priced_plan.plan for priced_plan in least], {}),
    )


def infeasible_peak(
    profile: Profile, config: AdaccConfig, budget: Budget, floor: Sequence[PricedPlan], bound: int
) -> InfeasibleBudgetError:
    """Return the error for a budget below the peak of `floor`, the policy with the least peak.

    `bound` is a lower bound on the peak of all policies.
    """
    outcome = simulate(profile, [priced_plan.plan for priced_plan in floor])
    needed = outcome.peak_bytes
    hint = f"{text}," if (text := budget_hint(budget.nbytes)) else ""
    origin = f" ({budget.nbytes} bytes)" if isinstance(budget.setting, str) else ""
    return InfeasibleBudgetError(
        f"memory_budget={budget.setting!r}{origin}{hint} is below the least possible peak of {needed} bytes "
        f"({format_bytes(needed)}), reached in {outcome.peak_label!r} with {config.describe_actions()} and a "
        f"{profile.head} head: {format_bytes(profile.static_bytes)} are live before a forward (parameters, optimizer "
        f"state, batches), and at least {format_bytes(outcome.stored_bytes)} are stored for backward. Raise "
        f"memory_budget, allow more actions or codecs, or use a smaller batch or shorter sequences",
        needed,
        min(bound, needed),
        policy_of_plans(profile, [priced_plan.plan for priced_plan in floor], {}),
    )
