"""Other methods to choose a policy, which the solver must not be worse than."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from adacc_hf.artifacts.config import AdaccConfig, Budget
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.solve.baselines import greedy_policies
from adacc_hf.solve.frontier import MixtureProgram, frontiers, stored_bytes
from adacc_hf.solve.linear_program import SolverLog
from adacc_hf.solve.milp import build_block_model
from adacc_hf.solve.minimum_peak import PeakOracle
from adacc_hf.solve.simple_policies import policy_of_plans


@pytest.fixture(scope="session")
def solve_greedy() -> Callable[[Profile, float | int], Policy]:
    """`solve_greedy(profile, budget)`: the first policy within the budget by the greedy rule of the paper's Table 1."""

    def solve(profile: Profile, memory_budget: float | int) -> Policy:
        config = AdaccConfig()
        budget = Budget.resolve(memory_budget, profile, config)
        oracle = PeakOracle(profile)
        needed = 0
        for policy in greedy_policies(profile, [build_block_model(kind, config) for kind in profile.kinds]):
            needed = oracle.peak_bytes(policy) if budget.limits_peak else stored_bytes(profile, policy)
            if needed <= budget.nbytes:
                return policy_of_plans(profile, [column.plan for column in policy])
        raise InfeasibleBudgetError(
            f"{memory_budget!r} is below the {needed} bytes that the greedy rule ends at", needed
        )

    return solve


@pytest.fixture(scope="session")
def one_plan_policies() -> Callable[[Profile], list[Policy]]:
    """`one_plan_policies(profile)`: policies with one plan per kind, as in the paper's program. They are the fastest at
    every percent of plain training's bytes, and, with one kind, those of its frontier."""

    def solve(profile: Profile) -> list[Policy]:
        config = AdaccConfig()
        models = [build_block_model(kind, config) for kind in profile.kinds]
        blocks = Counter(block.kind for block in profile.blocks)
        num_free = [blocks[k] for k in range(len(models))]
        log = SolverLog()
        program = MixtureProgram(profile, models, [[]] * len(models), num_free, log)
        columns_of_policies = [
            program.least_ms(profile.plain_stored_bytes * percent // 100) for percent in range(1, 101)
        ]
        columns_of_policies += [program.least_bytes()]
        if len(profile.kinds) == 1:
            (frontier,) = frontiers(SolverLog(), [build_block_model(profile.kinds[0], config)])
            columns_of_policies += [[column] * len(profile.blocks) for column in frontier]
        plans = dict.fromkeys(
            tuple(column.plan for column in columns) for columns in columns_of_policies if columns is not None
        )
        return [policy_of_plans(profile, policy) for policy in plans]

    return solve
