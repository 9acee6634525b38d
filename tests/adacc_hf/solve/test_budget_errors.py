"""Errors for budgets that no policy fits: the numbers in them are bytes of the policy with the least memory."""

from __future__ import annotations

import pytest

from adacc_hf.artifacts.config import AdaccConfig, Budget
from adacc_hf.artifacts.memory_simulator import simulate
from adacc_hf.solve.budget_errors import infeasible_peak, infeasible_stored
from adacc_hf.solve.frontier import fixed_bytes, stored_bytes
from adacc_hf.solve.milp import build_block_model, retain_all


@pytest.fixture
def profile(gpt2_like_profile):
    return gpt2_like_profile(num_blocks=2)


@pytest.fixture
def plain(profile):
    return [retain_all(build_block_model(kind, AdaccConfig())) for kind in profile.kinds] * 2


def test_a_peak_s_error_has_the_policy_and_its_peak(profile, plain):
    error = infeasible_peak(profile, AdaccConfig(), Budget("1GiB", 1 << 30, limits_peak=True), plain, bound=5)
    assert error.least is not None
    assert error.smallest_budget_bytes == error.least.predicted_peak_bytes
    assert error.bound_bytes == 5
    peak = simulate(profile, [plan.plan for plan in plain]).peak_bytes
    assert f"memory_budget='1GiB' ({1 << 30} bytes) is below the least possible peak of {peak} bytes" in str(error)


def test_a_bound_is_never_above_the_least_peak(profile, plain):
    error = infeasible_peak(profile, AdaccConfig(), Budget(1, 1, limits_peak=True), plain, bound=1 << 60)
    assert error.bound_bytes == error.smallest_budget_bytes


def test_the_error_of_stored_bytes_has_the_least_fraction_and_the_bytes_outside(profile, plain):
    floor = stored_bytes(profile, plain)
    error = infeasible_stored(profile, AdaccConfig(), Budget(0.1, 10, limits_peak=False), plain, floor, 4 * floor)
    assert error.smallest_budget_bytes == floor
    assert "a fraction of 0.2500" in str(error)
    assert f"the least possible is {floor} bytes" in str(error)
    assert fixed_bytes(profile) < floor
