"""The least peak, between the lower bound for every policy and the peaks of the frontier's plans."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profile_builders import SLOW_EXAMPLES, every_outcome_of

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.memory_simulator import simulate
from adacc_hf.solve.frontier import frontiers
from adacc_hf.solve.kinds import price_by_bytes
from adacc_hf.solve.linear_program import SolverLog
from adacc_hf.solve.milp import build_block_model
from adacc_hf.solve.minimum_peak import PeakOracle, least_bound, local_search
from adacc_hf.solve.search import PolicySearch
from adacc_hf.solve.solver import FAR, least_peak_bytes, quick_least_policy, solve_policy

SOLVING = settings(max_examples=40, **SLOW_EXAMPLES)


@SOLVING
@given(data=st.data())
def test_the_least_peak_lies_between_the_bound_and_the_frontier_s(profiles, data):
    profile = data.draw(profiles())
    peaks = [simulate(profile, [plan]).peak_bytes for plan, _ in every_outcome_of(profile.kinds[0])]
    models = [build_block_model(kind, AdaccConfig()) for kind in profile.kinds]
    columns = frontiers(SolverLog(), models)
    oracle = PeakOracle(profile)
    trail = [oracle.peak_bytes(policy) for policy in local_search(oracle, models, columns, oracle.least_peak(columns))]
    assert trail == sorted(set(trail), reverse=True)
    assert trail[0] == oracle.peak_bytes(oracle.least_peak(columns))
    assert least_bound(profile, columns) <= min(peaks) <= trail[-1]


def test_the_bound_is_that_of_every_head(gpt2_like_profile, add_chunked_head):
    profile = add_chunked_head(gpt2_like_profile(num_blocks=3), saved_bytes=10 << 30)
    models = [build_block_model(kind, AdaccConfig()) for kind in profile.kinds]
    columns = frontiers(SolverLog(), models)
    bounds = [least_bound(profile.with_head(name), columns) for name in profile.heads]
    with pytest.raises(InfeasibleBudgetError) as error:
        solve_policy(profile, 1)
    assert error.value.bound_bytes == min(*bounds, error.value.smallest_budget_bytes)


def test_the_least_peak_is_that_of_the_head_that_needs_least(gpt2_like_profile, add_chunked_head):
    profile = add_chunked_head(gpt2_like_profile(num_blocks=1), saved_bytes=1 << 30)
    floors = {}
    for head in ("plain", "chunked", "auto"):
        with pytest.raises(InfeasibleBudgetError) as error:
            solve_policy(profile, 1, AdaccConfig(head=head))
        floors[head] = error.value.smallest_budget_bytes
    assert floors["auto"] == floors["chunked"] < floors["plain"]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_without_a_large_head_has_a_lower_floor_and_more_memory_never_costs_time(gpt2_like_profile, attention):
    profile = gpt2_like_profile(num_blocks=3, attention=attention)
    profile = replace(profile, outside_peak_bytes=profile.static_bytes, loss_peak_bytes=profile.static_bytes)
    models = [price_by_bytes(build_block_model(kind, AdaccConfig())) for kind in profile.kinds]
    columns = frontiers(SolverLog(), models)
    oracle = PeakOracle(profile)
    trail = [oracle.peak_bytes(policy) for policy in local_search(oracle, models, columns, oracle.least_peak(columns))]
    assert trail[-1] < trail[0]
    bound = least_bound(profile, columns)
    with pytest.raises(InfeasibleBudgetError, match=f"no policy needs less than {bound} bytes") as error:
        solve_policy(profile, trail[-1] - 1)
    assert error.value.smallest_budget_bytes == trail[-1]
    assert error.value.bound_bytes == bound < trail[-1]
    assert pickle.loads(pickle.dumps(error.value)).bound_bytes == bound
    previous_ms = float("inf")
    budgets = sorted({*trail, *(trail[-1] + (trail[0] - trail[-1]) * i // 3 for i in range(10))})
    for budget in budgets:
        policy = solve_policy(profile, budget)
        assert policy.predicted_peak_bytes <= budget
        assert policy.predicted_overhead_ms <= previous_ms + 1e-9  # sums in another order
        previous_ms = policy.predicted_overhead_ms


@pytest.mark.parametrize("percent", [20, 80, 95, 99, 100, 101, 105, 120, 300])
def test_a_comparison_of_the_least_peak_with_a_budget_is_exact(gpt2_like_profile, percent):
    """A value within `FAR` of the budget is the least peak. Farther values are on the same side of the budget."""
    profile = gpt2_like_profile(num_blocks=4)
    least_bytes = quick_least_policy(profile).predicted_peak_bytes
    budget = least_bytes * percent // 100
    for nbytes in (budget - 1, budget):
        compared_bytes = least_peak_bytes(profile, nbytes)
        assert (compared_bytes <= nbytes) == (least_bytes <= nbytes)
        if abs(compared_bytes - nbytes) < FAR * nbytes:
            assert compared_bytes == least_bytes


def test_a_head_that_cannot_have_the_least_peak_is_not_searched(gpt2_like_profile, add_chunked_head, monkeypatch):
    searched = []
    search = PolicySearch.least_peak_bytes.fget
    monkeypatch.setattr(
        PolicySearch, "least_peak_bytes", property(lambda self: searched.append(self.profile.head) or search(self))
    )
    profile = add_chunked_head(gpt2_like_profile(num_blocks=3), saved_bytes=1 << 30)
    (chunked,) = profile.other_heads
    chunked = replace(chunked, outside_peak_bytes=profile.static_bytes, loss_peak_bytes=profile.static_bytes)
    profile = replace(profile, other_heads=(chunked,))
    least_bytes = quick_least_policy(profile).predicted_peak_bytes
    searched.clear()
    assert least_peak_bytes(profile, least_bytes) == least_bytes
    assert searched == ["chunked"]
