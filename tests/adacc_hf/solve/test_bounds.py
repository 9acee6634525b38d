"""The least peak, between the lower bound for every policy and the peaks of simple policies."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profile_builders import SLOW_EXAMPLES, every_outcome_of

from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.memory_simulator import simulate
from adacc_hf.solve.simple_policies import checkpoint_policy, uniform_policy
from adacc_hf.solve.solver import solve_policy

SOLVING = settings(max_examples=40, **SLOW_EXAMPLES)


def floor_and_bound(profile, config=None):
    with pytest.raises(InfeasibleBudgetError) as error:
        solve_policy(profile, 1, config)
    return error.value.smallest_budget_bytes, error.value.bound_bytes


@SOLVING
@given(data=st.data())
def test_the_least_peak_lies_between_the_bound_and_simple_policies(profiles, data):
    profile = data.draw(profiles())
    peaks = [simulate(profile, [plan]).peak_bytes for plan, _ in every_outcome_of(profile.kinds[0])]
    floor, bound = floor_and_bound(profile)
    assert bound <= min(peaks) <= floor
    simple = [uniform_policy(profile, "retain"), checkpoint_policy(profile)]
    assert floor <= min(policy.predicted_peak_bytes for policy in simple)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_without_a_large_head_has_a_lower_floor_and_is_no_slower_above_it(gpt2_like_profile, attention):
    profile = gpt2_like_profile(num_blocks=3, attention=attention)
    profile = replace(profile, outside_peak_bytes=profile.static_bytes, loss_peak_bytes=profile.static_bytes)
    floor, bound = floor_and_bound(profile)
    recomputing = min(uniform_policy(profile, "recompute"), checkpoint_policy(profile), key=peak_of)
    assert bound < floor < recomputing.predicted_peak_bytes
    with pytest.raises(InfeasibleBudgetError, match=f"no policy needs less than {bound} bytes") as error:
        solve_policy(profile, floor - 1)
    assert error.value.smallest_budget_bytes == floor
    assert pickle.loads(pickle.dumps(error.value)).bound_bytes == bound
    most_ms = solve_policy(profile, floor).predicted_overhead_ms
    budgets = [floor + (recomputing.predicted_peak_bytes - floor) * i // 3 for i in (0, 1, 3, 9)]
    for budget in budgets:
        policy = solve_policy(profile, budget)
        assert policy.predicted_peak_bytes <= budget
        assert policy.predicted_overhead_ms <= most_ms


def peak_of(policy):
    return policy.predicted_peak_bytes
