"""Errors for budgets that no policy fits: the numbers in them are bytes of the policy with the least memory."""

from __future__ import annotations

import pytest

from adacc_hf.artifacts.config import AdaccConfig, Budget
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.solve.solver import infeasible_budget


@pytest.fixture
def profile(gpt2_like_profile):
    return gpt2_like_profile(num_blocks=2)


def test_a_peak_s_error_has_the_policy_and_its_peak(profile):
    plain = uniform_policy(profile, "retain")
    error = infeasible_budget(profile, AdaccConfig(), Budget("1GiB", 1 << 30, limits_peak=True), plain, bound=5)
    peak = plain.predicted_peak_bytes
    assert (error.least, error.smallest_budget_bytes, error.bound_bytes) == (plain, peak, 5)
    assert f"memory_budget='1GiB' ({1 << 30} bytes) is below the least possible peak of {peak} bytes" in str(error)
    assert "no policy needs less than 5 bytes" in str(error)


def test_a_bound_is_never_above_the_least_peak(profile):
    plain = uniform_policy(profile, "retain")
    error = infeasible_budget(profile, AdaccConfig(), Budget(1, 1, limits_peak=True), plain, bound=1 << 60)
    assert error.bound_bytes == error.smallest_budget_bytes
    assert "no policy needs less" not in str(error)


def test_the_error_of_stored_bytes_has_the_least_fraction_and_the_bytes_outside(profile):
    least = uniform_policy(profile, "recompute")
    floor = least.predicted_stored_bytes
    error = infeasible_budget(profile, AdaccConfig(), Budget(0.1, 10, limits_peak=False), least, floor)
    assert error.smallest_budget_bytes == floor
    assert f"the least possible is {floor} bytes" in str(error)
    assert f"a fraction of {floor / profile.plain_stored_bytes + 5e-5:.4f}" in str(error)
