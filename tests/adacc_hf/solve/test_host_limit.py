"""The solver under two limits, of the device's and of the host's memory, compared with trying everything."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from profile_builders import SLOW_EXAMPLES, bytes_of_step, every_outcome_of

from adacc_hf.artifacts.budget_values import HOST_SHARE
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.host_link import HostLink
from adacc_hf.artifacts.memory_simulator import simulate_policy
from adacc_hf.solve.simple_policies import random_policy, uniform_policy
from adacc_hf.solve.solver import quick_least_policy, solve_policy

SOLVING = settings(max_examples=40, **SLOW_EXAMPLES)
LINK = HostLink(to_host_bytes_per_ms=8.0, to_device_bytes_per_ms=4.0, copy_ms=1 / 8)
"""Rates with which times are multiples of 1/8, as the other times of small profiles."""
MS_ROUNDING = 1e-9
"""Tolerance for sums of fewer than 10^4 terms of the order of 1 ms, each with a relative error of 1e-16."""


def with_host(profile, data):
    """Return `profile` with a link to the host, on which some values of each kind may move."""
    kinds = []
    for kind in profile.kinds:
        candidates = [value.index for value in kind.activations]
        moved = data.draw(st.lists(st.sampled_from(candidates), max_size=2, unique=True)) if candidates else []
        values = tuple(replace(value, is_movable=value.index in moved) for value in kind.values)
        kinds.append(replace(kind, values=values, host_link=LINK))
    return replace(profile, kinds=tuple(kinds))


def limited(profile, limit):
    """Return (profile, config) under which the solver may store `limit` bytes in host memory."""
    return replace(profile, host_free_bytes=2 * limit), AdaccConfig(host_memory=0.5)


@settings(SOLVING, max_examples=20)
@given(data=st.data())
def test_one_block_is_solved_as_well_as_by_trying_everything(profiles, data):
    """With or without values that may move: then the limit is zero."""
    profile = with_host(data.draw(profiles()), data)
    outcomes = [outcome for _, outcome in every_outcome_of(profile.kinds[0])]
    points = [(bytes_of_step(profile, [o]), o.host_bytes, o.overhead_ms) for o in outcomes]
    limit = data.draw(st.sampled_from(sorted({host for _, host, _ in points})))
    allowed = [(size, ms) for size, host, ms in points if host <= limit]
    sizes = sorted({size for size, _ in allowed})
    profile, config = limited(profile, limit)
    # The program of a block does not know the bytes of a shared tensor that a replay reads.
    (shared_bytes,) = [shared.nbytes for shared in profile.shared if not shared.saved]
    for size in {sizes[0], sizes[len(sizes) // 2], data.draw(st.sampled_from(sizes))}:
        nbytes = size + shared_bytes
        best_ms, known_ms = (min(ms for size, ms in allowed if size <= limit) for limit in (nbytes, size))
        policy = solve_policy(profile, min(1.0, nbytes / profile.plain_stored_bytes), config)
        assert policy.predicted_stored_bytes <= nbytes
        assert policy.predicted_host_bytes <= limit
        assert best_ms - MS_ROUNDING <= policy.predicted_overhead_ms <= known_ms + MS_ROUNDING
    assume(sizes[0] > 1)
    with pytest.raises(InfeasibleBudgetError) as error:
        solve_policy(profile, (sizes[0] - 1) / profile.plain_stored_bytes, config)
    assert sizes[0] <= error.value.smallest_budget_bytes <= sizes[0] + shared_bytes
    assert error.value.least.predicted_host_bytes <= limit


@SOLVING
@given(data=st.data())
def test_peaks_and_host_bytes_stay_within_their_limits(profiles, data):
    profile = with_host(data.draw(profiles(num_kinds=data.draw(st.integers(1, 2)), max_blocks=3)), data)
    unlimited = [simulate_policy(profile, random_policy(profile, seed, ("retain", "compress"))) for seed in range(3)]
    limit = data.draw(st.integers(0, max(outcome.host_bytes for outcome in unlimited)))
    profile, config = limited(profile, limit)
    least = quick_least_policy(profile, config)
    without_host = quick_least_policy(profile, AdaccConfig())
    assert least.predicted_peak_bytes <= without_host.predicted_peak_bytes
    plain_bytes = uniform_policy(profile, "retain").predicted_peak_bytes
    for part in range(4):
        budget = least.predicted_peak_bytes + (plain_bytes - least.predicted_peak_bytes) * part // 3
        policy = solve_policy(profile, budget, config)
        outcome = simulate_policy(profile, policy)
        assert outcome.peak_bytes == policy.predicted_peak_bytes <= budget
        assert outcome.host_bytes == policy.predicted_host_bytes <= limit
        # Host memory never makes a policy slower.
        if without_host.predicted_peak_bytes <= budget:
            slower = solve_policy(profile, budget, AdaccConfig())
            assert policy.predicted_overhead_ms <= slower.predicted_overhead_ms + MS_ROUNDING


def movable(profile, free_bytes, **rates):
    """Return `profile` on a device whose host has `free_bytes`. All activations may move."""
    link = replace(LINK, **rates)
    kinds = tuple(
        replace(kind, host_link=link, values=tuple(replace(v, is_movable=v.activation) for v in kind.values))
        for kind in profile.kinds
    )
    return replace(profile, kinds=kinds, host_free_bytes=free_bytes)


FAST = {"to_host_bytes_per_ms": 1e12, "to_device_bytes_per_ms": 1e12, "copy_ms": 1e-6}
SLOW = {"to_host_bytes_per_ms": 1.0, "to_device_bytes_per_ms": 1.0}


def test_host_memory_is_used_where_copies_are_faster_than_replay_and_codecs(gpt2_like_profile):
    profile = gpt2_like_profile(num_blocks=4)
    config = AdaccConfig(host_memory="1TiB", actions=("retain", "recompute"))
    fast, slow = movable(profile, 1 << 45, **FAST), movable(profile, 1 << 45, **SLOW)
    assert solve_policy(fast, 0.3, config).predicted_host_bytes > 0.6 * profile.plain_stored_bytes
    assert solve_policy(slow, 0.3, config).predicted_host_bytes == 0
    assert solve_policy(fast, 0.3, config).predicted_overhead_ms < solve_policy(slow, 0.3, config).predicted_overhead_ms


def test_without_the_setting_nothing_moves(gpt2_like_profile):
    profile = gpt2_like_profile(num_blocks=2)
    policy = solve_policy(movable(profile, 1 << 45, **FAST), 0.3)
    assert policy.predicted_host_bytes == 0
    assert policy.plans == solve_policy(profile, 0.3).plans
    assert "host_limit_bytes" not in dict(policy.facts)


@pytest.mark.parametrize("actions", [("retain",), ("retain", "recompute"), ("retain", "compress", "recompute")])
def test_moving_is_lossless_and_needs_no_action(gpt2_like_profile, actions):
    profile = movable(gpt2_like_profile(num_blocks=2), 1 << 45, **FAST)
    policy = solve_policy(profile, 0.3, AdaccConfig(host_memory="1TiB", actions=actions))
    codecs = {choice.codec for plan in policy.plans for _, choice in plan.choices if choice.codec}
    assert policy.predicted_host_bytes > 0
    if "compress" not in actions:
        assert codecs <= {"host", "bitmask", "bitmask+host"}


def test_named_codecs_hold_in_host_memory_too(gpt2_like_profile):
    profile = movable(gpt2_like_profile(num_blocks=2), 1 << 45, **FAST)
    names = {option.codec for kind in profile.kinds for value in kind.values for option in value.codecs}
    (first, *_) = sorted(names - {"bitmask"})
    policy = solve_policy(profile, 0.05, AdaccConfig(host_memory="1TiB", codecs=(first,)))
    codecs = {choice.codec for plan in policy.plans for _, choice in plan.choices if choice.codec}
    assert codecs <= {"host", "bitmask", "bitmask+host", first, f"{first}+host"}


def test_the_limit_is_a_size_or_a_fraction_of_the_free_memory():
    free = 100 << 30
    assert AdaccConfig().host_limit(free) == 0
    assert AdaccConfig(host_memory=0.5).host_limit(free) == free // 2
    assert AdaccConfig(host_memory="10GiB").host_limit(free) == 10 << 30
    assert AdaccConfig(host_memory=1 << 40).host_limit(free) == math.floor(HOST_SHARE * free)
    assert AdaccConfig(host_memory=1 << 40).host_limit(0) == 0
