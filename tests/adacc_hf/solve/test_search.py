"""The search with an incumbent: it finds a faster policy, the same one as without an incumbent, or None."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adacc_hf.artifacts.config import AdaccConfig, Budget
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.solve.kinds import Kinds
from adacc_hf.solve.minimum_peak import least_bound
from adacc_hf.solve.search import PolicySearch
from adacc_hf.solve.simple_policies import uniform_policy

CONFIG = AdaccConfig()


def found_ms(profile, budget, incumbent_ms=math.inf):
    """Return the time of the policy found by a new search, or infinity."""
    search = PolicySearch(profile, CONFIG, Kinds.of(profile, CONFIG))
    policy = search.within(budget, incumbent_ms)
    return math.inf if policy is None else search.rank(policy)[0]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_a_rival_hides_nothing_that_is_faster(profiles, data):
    profile = data.draw(profiles(num_kinds=data.draw(st.integers(1, 2)), max_blocks=3))
    part = data.draw(st.integers(4, 19))
    nbytes = {
        True: uniform_policy(profile, "retain").predicted_peak_bytes * part // 20,
        False: profile.plain_stored_bytes * part // 20,
    }
    budget = Budget(part / 20, nbytes[limits_peak := data.draw(st.booleans())], limits_peak)
    try:
        alone_ms = found_ms(profile, budget)
    except InfeasibleBudgetError:
        return
    # Times are multiples of 1/8, so that a thousandth decides.
    assert found_ms(profile, budget, alone_ms + 1e-3) == pytest.approx(alone_ms, abs=1e-9)
    assert found_ms(profile, budget, alone_ms / 2) >= alone_ms - 1e-9


def test_what_is_slower_than_a_rival_takes_no_program(gpt2_like_profile):
    profile = gpt2_like_profile(num_blocks=12)
    nbytes = 4 * uniform_policy(profile, "retain").predicted_peak_bytes // 5
    budget = Budget(nbytes, nbytes, limits_peak=True)
    kinds = Kinds.of(profile, CONFIG)
    search = PolicySearch(profile, CONFIG, kinds)
    policy = search.within(budget)
    before = kinds.log.num_solves
    bound_ms = search.bound_ms(budget)
    assert bound_ms < search.rank(policy)[0]
    search.within(budget, bound_ms)
    assert kinds.log.num_solves == before


def test_the_bound_knows_what_a_backward_has_no_room_for(gpt2_like_profile):
    profile = gpt2_like_profile(num_blocks=3)
    profile = replace(profile, outside_peak_bytes=profile.static_bytes, loss_peak_bytes=profile.static_bytes)
    search = PolicySearch(profile, CONFIG, Kinds.of(profile, CONFIG))
    least = least_bound(profile, search.kinds.frontiers)
    bounds = [search.bound_ms(Budget(nbytes, nbytes, limits_peak=True)) for nbytes in (least - 1, least, 2 * least)]
    assert bounds[0] == math.inf
    assert math.inf > bounds[1] > bounds[2]


def test_a_policy_that_does_not_fit_counts_once_as_a_miss(tape_builder, profile_of):
    """A policy that does not fit counts as one miss, however many amounts are tried between two sums of few
    activations."""
    tape = tape_builder()
    start = tape.value("input", 4)
    for name, nbytes in (("small", 200), ("large", 800)):
        tape.operator(name, [start], [(name, nbytes)], nbytes / 100, save=[-1])
    profile = profile_of([tape.kind(digest="two")], [0], outside_stored_bytes=0)
    search = PolicySearch(profile, CONFIG, Kinds.of(profile, CONFIG))
    least = search.uniform_program.least_bytes()
    assert search.rank(least) == (10.0, 4)

    def fits(policy):
        return search.rank(policy) != (8.0, 204)

    plentiful = Budget(10000, 10000, limits_peak=True)
    ranks = map(search.rank, search.uniform_policies(least, least, plentiful, fits, math.inf))
    assert list(dict.fromkeys(ranks)) == [(10.0, 4), (2.0, 804), (0.0, 1000)]
