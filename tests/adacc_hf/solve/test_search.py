"""The search: it agrees with trying everything, with and without a known policy, and its bounds hold."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from profile_builders import SLOW_EXAMPLES

from adacc_hf.artifacts.config import AdaccConfig, Budget
from adacc_hf.artifacts.memory_simulator import simulate
from adacc_hf.solve.plan_pools import PlanPools
from adacc_hf.solve.search import Limits, PolicySearch
from adacc_hf.solve.simple_policies import uniform_policy

SOLVING = settings(max_examples=25, **SLOW_EXAMPLES)


def search_of(profile, limits_peak=True):
    return PolicySearch(profile, PlanPools(profile, AdaccConfig(), limits_peak=limits_peak, host_limit=0))


def limits_of(nbytes, limits_peak=True):
    return Limits(Budget(nbytes, nbytes, limits_peak), 0)


def ms_of(profile, limits, most_ms=math.inf):
    """Return the time of the policy that a new search finds, or infinity."""
    search = search_of(profile, limits.budget.limits_peak)
    policy = search.within(limits, most_ms)
    return math.inf if policy is None else search.ms(policy)


def outcomes_of(profile, search, is_known=lambda candidate: True):
    """Return the simulated outcomes of all policies with plans of the pools for which `is_known` is true."""
    pools = [filter(is_known, search.pools.by_kind[block.kind].candidates) for block in profile.blocks]
    plans = itertools.product(*([candidate.plan for candidate in pool] for pool in pools))
    return [simulate(profile, each) for each in plans]


@SOLVING
@given(data=st.data())
def test_the_search_is_as_good_as_trying_all_plans_of_its_pools(profiles, data):
    profile = data.draw(profiles(num_kinds=2, max_blocks=1))
    search = search_of(profile)
    search.pools.extend()
    outcomes = outcomes_of(profile, search)
    nbytes = data.draw(st.sampled_from([outcome.peak_bytes for outcome in outcomes]))
    best_ms = min(outcome.overhead_ms for outcome in outcomes if outcome.peak_bytes <= nbytes)
    policy = search.within(limits_of(nbytes))
    # Two labels that store as many bytes compete, though one may add less to a forward: in few profiles it is needed.
    assert policy is not None
    assert simulate(profile, [candidate.plan for candidate in policy]).peak_bytes <= nbytes
    assert search.ms(policy) <= best_ms + 1.0


@SOLVING
@given(data=st.data())
def test_the_least_peak_is_that_of_the_best_plans_that_do_not_depend_on_times(profiles, data):
    profile = data.draw(profiles(num_kinds=2, max_blocks=2))
    search = search_of(profile)
    peak = search.least(limits_of(1).budget, 0).predicted_peak_bytes
    peaks = [each.peak_bytes for each in outcomes_of(profile, search, lambda candidate: not candidate.is_timed)]
    assert peak == min(peaks)
    assert search.least(limits_of(1).budget, 0, peak - 1) is None
    assert search.bound_bytes(limits_of(1).budget) <= peak
    assert search.fitting(limits_of(peak))
    assert search.fitting(limits_of(peak - 1)) is None


@SOLVING
@given(data=st.data())
def test_with_a_rival_the_search_finds_nothing_slower(profiles, data):
    profile = data.draw(profiles(num_kinds=data.draw(st.integers(1, 2)), max_blocks=3))
    part = data.draw(st.integers(4, 19))
    limits_peak = data.draw(st.booleans())
    plain = uniform_policy(profile, "retain")
    nbytes = plain.predicted_peak_bytes if limits_peak else profile.plain_stored_bytes
    limits = limits_of(nbytes * part // 20, limits_peak)
    alone_ms = ms_of(profile, limits)
    for most_ms in (alone_ms + 1e-3, alone_ms / 2):
        known_ms = ms_of(profile, limits, most_ms)
        assert known_ms == math.inf or known_ms <= most_ms + 1e-5  # times are rounded to nanoseconds


def test_what_is_slower_than_a_rival_is_not_searched(gpt2_like_profile, solves):
    profile = gpt2_like_profile(num_blocks=12)
    limits = limits_of(4 * uniform_policy(profile, "retain").predicted_peak_bytes // 5)
    search = search_of(profile)
    policy = search.within(limits)
    before = solves.call_count
    bound_ms = search.bound_ms(limits.budget)
    assert bound_ms < search.ms(policy)
    assert search.within(limits, bound_ms) is None
    assert solves.call_count == before


def test_the_bound_knows_what_a_backward_has_no_room_for(gpt2_like_profile):
    profile = gpt2_like_profile(num_blocks=3)
    profile = replace(profile, outside_peak_bytes=profile.static_bytes, loss_peak_bytes=profile.static_bytes)
    search = search_of(profile)
    least = search.bound_bytes(limits_of(1).budget)
    bounds = [search.bound_ms(limits_of(nbytes).budget) for nbytes in (least - 1, least, 2 * least)]
    assert bounds[0] == math.inf
    assert math.inf > bounds[1] > bounds[2]


def test_stored_plans_are_in_the_best_order(gpt2_like_profile):
    """Under a budget on stored bytes, any order of the plans of one kind fits."""
    # No head, because it would have the peak in any order.
    profile = replace(gpt2_like_profile(num_blocks=4), outside_peak_bytes=0, loss_peak_bytes=0)
    policy = search_of(profile, False).within(limits_of(profile.plain_stored_bytes // 2, False))
    plans = [candidate.plan for candidate in policy]
    peaks = {simulate(profile, order).peak_bytes for order in itertools.permutations(plans)}
    assert simulate(profile, plans).peak_bytes == min(peaks)
