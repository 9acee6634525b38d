"""The solver against all policies of a small profile, and its reported bound."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from profile_builders import SLOW_EXAMPLES, bytes_of_step, every_outcome_of

from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.memory_simulator import step_peak_bytes
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.solve.solver import solve_policy

SOLVING = settings(max_examples=20, **SLOW_EXAMPLES)
MS_ROUNDING = 1e-9
"""Tolerance, as in test_solver.py."""


@SOLVING
@given(data=st.data())
def test_no_policy_of_two_blocks_is_faster_than_the_gap_allows(profiles, data):
    profile = data.draw(profiles(num_kinds=data.draw(st.integers(1, 2)), max_blocks=2))
    outcomes = [best_outcomes(profile.kind_of(block)) for block in profile.blocks]
    part = data.draw(st.integers(1, 19)) / 20
    plain_bytes = uniform_policy(profile, "retain").predicted_peak_bytes
    for budget in (part, int(part * plain_bytes)):
        try:
            policy = solve_policy(profile, budget)
        except InfeasibleBudgetError:
            continue
        facts = dict(policy.facts)
        needs = step_peak_bytes if facts["budget_of"] == "peak" else bytes_of_step
        best_ms = min(
            sum(outcome.overhead_ms for outcome in pair)
            for pair in itertools.product(*outcomes)
            if needs(profile, pair) <= facts["budget_bytes"]
        )
        # `frontier.SLOPE_TOLERANCE` of about 100 ms.
        assert (1 - facts["gap"]) * policy.predicted_overhead_ms <= best_ms + 1e-4
        if facts["status"] == "optimal":
            assert policy.predicted_overhead_ms <= best_ms + 1e-4


def best_outcomes(kind):
    """Return the outcomes of feasible plans, without those that another plan dominates."""
    best: dict[tuple[int, int, int, int, frozenset[int]], object] = {}
    for _, outcome in every_outcome_of(kind):
        sizes = (outcome.stored_bytes, outcome.live_bytes, outcome.working_bytes, outcome.forward_working_bytes)
        incumbent = best.setdefault((*sizes, outcome.shared), outcome)
        if outcome.overhead_ms < incumbent.overhead_ms:
            best[(*sizes, outcome.shared)] = outcome
    return list(best.values())


def test_large_models_come_close_to_the_bound(gpt2_like_profile):
    for num_blocks, most in ((12, 0.03), (48, 0.01)):
        profile = gpt2_like_profile(num_blocks=num_blocks)
        for part in (0.2, 0.5, 0.8):
            facts = dict(solve_policy(profile, part).facts)
            # The last block takes a single plan, and loses at most one step of many along the frontier.
            assert facts["gap"] < most
            assert facts["status"] == ("optimal" if facts["gap"] == 0.0 else "feasible")
