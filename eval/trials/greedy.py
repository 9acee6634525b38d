"""The greedy rule behind the paper's Table 1 as a baseline for the solver."""

from __future__ import annotations

from adacc_hf.artifacts.config import AdaccConfig, Budget
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.solve.baselines import greedy_policies
from adacc_hf.solve.frontier import stored_bytes
from adacc_hf.solve.milp import build_block_model
from adacc_hf.solve.minimum_peak import PeakOracle


def solve_greedy(
    profile: Profile, memory_budget: str | float | int | None = None, config: AdaccConfig | None = None
) -> Policy:
    """The first policy of the greedy rule that keeps to a budget, by the signature of `solve_policy`.

    Raises ValueError for a budget in no known form, InfeasibleBudgetError if the rule ends above the budget.
    """
    config = config or AdaccConfig()
    given = config.memory_budget if memory_budget is None else memory_budget
    budget = Budget.resolve(given, profile, config)
    oracle = PeakOracle(profile)
    needed = 0
    for policy in greedy_policies(profile, [build_block_model(kind, config) for kind in profile.kinds]):
        needed = oracle.peak_bytes(policy) if budget.of_peak else stored_bytes(profile, policy)
        if needed <= budget.nbytes:
            return Policy.build(profile, [column.plan for column in policy])
    raise InfeasibleBudgetError(
        f"memory_budget={given!r} is below the {needed} bytes that the greedy rule ends at: raise it, or let the "
        f"solver look for a better policy",
        needed,
    )
