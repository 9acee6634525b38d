"""Policies without a solver: one action for all activations, or random actions."""

from dataclasses import replace

import pytest

from adacc_hf.artifacts.policy import Action
from adacc_hf.solve.simple_policies import random_policy, uniform_policy


@pytest.fixture
def profile(gpt2_like_profile):
    return gpt2_like_profile(num_blocks=3)


@pytest.mark.parametrize("action", list(Action))
def test_uniform_gives_the_action_to_all_that_can_take_it(profile, action):
    policy = uniform_policy(profile, action)
    assert len(policy.plans) == 1
    kind = profile.kinds[0]
    for value, choice in policy.plans[0].choices:
        able = {
            Action.RETAIN: True,
            Action.RECOMPUTE: kind.values[value].recomputable,
            Action.COMPRESS: bool(kind.values[value].codecs),
        }[action]
        assert (choice.action is action) or not able
    assert [name for name, _ in policy.blocks] == ["h.0", "h.1", "h.2"]


def test_uniform_recompute_stores_masks_as_bits(profile):
    choices = dict(uniform_policy(profile, "recompute").plans[0].choices)
    masks = [value.index for value in profile.kinds[0].activations if value.name.endswith(".mask")]
    assert len(masks) == 2
    assert {choices[mask].codec for mask in masks} == {"bitmask"}


def test_uniform_takes_one_codec_where_asked(profile):
    policy = uniform_policy(profile, "compress", "int8")
    assert {choice.codec for _, choice in policy.plans[0].choices} == {None, "int8"}
    with pytest.raises(ValueError, match=r"codec='zip' was not priced in this profile, which has .*int8"):
        uniform_policy(profile, "compress", "zip")
    (kind,) = profile.kinds
    coarse = replace(kind.values[0], too_coarse=(("zip", 0.3),))
    with pytest.raises(ValueError, match=r"'zip' degraded the gradient in every measurement of .*, which has .*int8"):
        uniform_policy(replace(profile, kinds=(replace(kind, values=(coarse, *kind.values[1:])),)), "compress", "zip")


def test_random_is_reproducible_and_uses_the_actions_it_may(profile):
    first = random_policy(profile, seed=1)
    assert first == random_policy(profile, seed=1) != random_policy(profile, seed=2)
    assert set(first.action_counts()) == {"retain", "recompute"}
    lossless = random_policy(profile, 1, tuple(Action), lossless=True)
    assert {choice.codec for plan in lossless.plans for _, choice in plan.choices} == {None, "bitmask"}
