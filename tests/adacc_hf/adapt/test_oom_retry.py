"""The tighter budget after a policy ran out of memory."""

import pytest

from adacc_hf import AdaccConfig, solve_policy
from adacc_hf.adapt.oom_retry import tighter_budget
from adacc_hf.artifacts.config import Budget


@pytest.mark.parametrize("form", ["auto", "bytes", "fraction"])
def test_a_policy_that_ran_out_of_memory_may_have_nine_tenths_of_what_it_kept_to(gpt2_like_profile, form):
    profile = gpt2_like_profile(num_blocks=4)
    peak = solve_policy(profile, 0.6).predicted_peak_bytes
    budget = {"auto": "auto", "bytes": peak, "fraction": 0.6}[form]
    config = AdaccConfig(memory_budget=budget)
    policy = solve_policy(profile, budget, config)
    tighter = tighter_budget(policy, profile, Budget.resolve(budget, profile, config))
    if form == "fraction":
        stored_share = policy.predicted_stored_bytes / profile.plain_stored_bytes
        assert tighter == pytest.approx(0.9 * stored_share, abs=1e-6)  # rounded down to a millionth
    else:
        assert tighter == int(0.9 * policy.predicted_peak_bytes)
