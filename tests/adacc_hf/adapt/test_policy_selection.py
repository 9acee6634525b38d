"""When the solver runs again, and that no gain is missed if it does not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import adacc_hf.adapt.policy_selection as selection_module
from adacc_hf import AdaccConfig, profile_model, solve_policy
from adacc_hf.adapt.policy_selection import MIN_FREED, current_policy, freed_bytes, replan
from adacc_hf.adapt.profile_updates import with_errors, with_outlier_counts
from adacc_hf.solve.simple_policies import random_policy, uniform_policy

CONFIG = AdaccConfig(min_compress_bytes=0, memory_budget=1.0)


@pytest.fixture(scope="module")
def profile(tiny_gpt2, token_batch):
    return profile_model(tiny_gpt2(), token_batch(), CONFIG)


def with_channels(profile, count):
    """Return `profile` with `count` outlier channels in every activation that allows them and is wide enough."""
    wide = [v.index for v in profile.kinds[0].values if v.encoded_shape[-1:] > (8,)]
    return with_outlier_counts(profile, {(0, value): count for value in wide})


@settings(max_examples=25)
@given(before=st.integers(0, 8), after=st.integers(0, 8), seed=st.integers(0, 99))
def test_no_policy_can_save_more_than_was_freed(profile, before, after, seed):
    earlier, later = with_channels(profile, before), with_channels(profile, after)
    policy = random_policy(earlier, seed, ("retain", "compress", "recompute"))
    then, now = (current_policy(prices, policy).predicted_stored_bytes for prices in (earlier, later))
    num_freed_bytes = freed_bytes(earlier, later, CONFIG)
    assert then - now <= num_freed_bytes
    assert (num_freed_bytes > 0) == (after < before)


@pytest.fixture
def searches(monkeypatch):
    """The profiles that the solver was called with. Its stand-in compresses nothing."""
    profiles = []

    def solve(profile, *_):
        profiles.append(profile)
        return uniform_policy(profile, "retain")

    monkeypatch.setattr(selection_module, "solve_policy", solve)
    return profiles


def test_the_solver_is_asked_once_enough_was_freed_however_slowly(profile, searches):
    stored = uniform_policy(profile, "compress").predicted_stored_bytes
    one_channel = freed_bytes(with_channels(profile, 1), profile, CONFIG)
    needed = math.ceil(MIN_FREED * stored / one_channel)
    last_solved = with_channels(profile, needed + 2)
    policy = uniform_policy(last_solved, "compress")
    for count in range(needed + 1, -1, -1):
        prices = with_channels(profile, count)
        result = replan(prices, policy, 1.0, CONFIG, last_solved)
        if result.has_solved:
            break
        policy = result.policy
    num_freed_bytes = freed_bytes(last_solved, prices, CONFIG)
    assert searches == [prices]
    assert MIN_FREED * current_policy(prices, policy).predicted_stored_bytes <= num_freed_bytes
    assert result.reason.endswith("predicted overhead")


def test_the_solver_is_not_asked_as_long_as_memory_is_only_lost(profile, searches):
    policy = uniform_policy(profile, "compress")
    result = replan(with_channels(profile, 3), policy, 1.0, CONFIG, profile)
    assert not searches
    assert not result.has_solved
    assert result.policy == current_policy(with_channels(profile, 3), policy)


def test_a_codec_that_keeps_to_the_bound_again_is_memory_freed(profile):
    bounded = CONFIG.with_overrides(max_error=0.5)
    keys = [(0, v.index, "outlier_int4") for v in profile.kinds[0].values if v.codecs]
    degraded = with_errors(profile, dict.fromkeys(keys, 0.9))
    assert freed_bytes(degraded, profile, CONFIG) == 0
    assert freed_bytes(degraded, profile, bounded) > 0
    assert freed_bytes(profile, degraded, bounded) == 0


@pytest.mark.parametrize(("gain", "is_taken"), [(0.0, False), (0.01, False), (0.03, True)])
def test_what_a_faster_head_saves_is_no_part_of_what_a_gain_is_compared_with(
    gpt2_like_profile, add_chunked_head, monkeypatch, gain, is_taken
):
    """The time that a faster head saves is not part of the overhead that a gain is compared with. Otherwise the
    overhead is below 0, and a gain of 0 is more than a share of it."""
    profile = add_chunked_head(gpt2_like_profile(num_blocks=2), 100, ms=-15.0)
    policy, other = (solve_policy(profile, fraction) for fraction in (0.6, 0.7))
    assert (policy.head, policy.predicted_overhead_ms < 0) == ("chunked", True)
    blocks_ms = policy.predicted_overhead_ms + 15.0
    offered = replace(other, predicted_overhead_ms=policy.predicted_overhead_ms - gain * blocks_ms)
    monkeypatch.setattr(selection_module, "freed_bytes", lambda *_: policy.predicted_stored_bytes)
    monkeypatch.setattr(selection_module, "solve_policy", lambda *_: offered)
    result = replan(profile, policy, 0.6, AdaccConfig(), last_solved=profile)
    assert result.has_solved
    assert (result.policy is not None) == is_taken
