"""Policies of users and of checkpoints that do not keep to the settings of the run."""

import re
from dataclasses import replace

import pytest

from adacc_hf.adapt.policy_checks import excluded_action, refuse_policy
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.solve.solver import solve_policy

EXACT = AdaccConfig(actions=("retain", "recompute"))


@pytest.fixture
def profile(gpt2_like_profile):
    return gpt2_like_profile()


@pytest.fixture
def policy(profile):
    return solve_policy(profile, 0.5, AdaccConfig())


def refuse(policy, budget=None, plain_bytes=None, **settings):
    """Check a policy that stores nothing in host memory."""
    refuse_policy(policy, AdaccConfig(**settings, memory_budget=budget or "auto"), 0, plain_bytes)


def test_a_budget_that_a_users_policy_keeps_to_is_accepted(policy, profile):
    stored, peak, plain_bytes = policy.predicted_stored_bytes, policy.predicted_peak_bytes, profile.plain_stored_bytes
    for budget in ("auto", peak, f"{peak}B", 0.5, stored / plain_bytes):
        refuse(policy, budget, plain_bytes)
        refuse(policy, budget)


def test_a_budget_that_a_users_policy_exceeds_is_refused_with_both_sizes(policy, profile):
    stored, peak, plain_bytes = policy.predicted_stored_bytes, policy.predicted_peak_bytes, profile.plain_stored_bytes
    with pytest.raises(ValueError, match=f"memory_budget={peak - 1} allows .* has a peak of {format_bytes(peak)}"):
        refuse(policy, peak - 1, plain_bytes)
    fraction = 0.99 * stored / plain_bytes
    for known_bytes in (plain_bytes, None):
        with pytest.raises(ValueError, match=f"allows .*, and the policy .* stores {format_bytes(stored)}: leave one"):
            refuse(policy, fraction, known_bytes)


def test_a_fraction_of_what_nobody_knows_is_not_judged(profile):
    policy = uniform_policy(profile, "retain")
    assert "memory_budget" not in dict(policy.facts)
    refuse(policy, 0.01)
    with pytest.raises(ValueError, match="stores"):
        refuse(policy, 0.01, profile.plain_stored_bytes)


@pytest.mark.parametrize(
    "config",
    [AdaccConfig(), EXACT, AdaccConfig(actions=("retain",)), AdaccConfig(actions=("retain", "compress"), max_error=0)],
    ids=repr,
)
@pytest.mark.parametrize("budget", [0.3, 0.6, 1.0])
def test_a_policy_keeps_to_the_settings_that_it_was_solved_with(profile, config, budget):
    try:
        policy = solve_policy(profile, budget, config)
    except InfeasibleBudgetError as error:
        policy = error.least
    assert excluded_action(policy, config) is None


@pytest.mark.parametrize(
    ("action", "settings", "message"),
    [
        (
            "recompute",
            {"actions": ("retain",)},
            "recomputes activations, which actions=('retain',) excludes: leave out",
        ),
        ("compress", {"actions": ("retain", "recompute")}, "which actions=('retain', 'recompute') excludes"),
        ("compress", {"max_error": 0}, "which max_error=0 excludes"),
    ],
)
def test_actions_that_the_settings_exclude_are_refused(profile, action, settings, message):
    policy = uniform_policy(profile, action)
    refuse(policy)
    with pytest.raises(ValueError, match="the policy that was passed in .*" + re.escape(message)):
        refuse(policy, **settings)


def test_a_chunked_head_is_refused_where_gradients_must_be_exact(profile):
    policy = replace(uniform_policy(profile, "retain"), head="chunked")
    assert excluded_action(policy, AdaccConfig()) is None
    assert excluded_action(policy, EXACT) == (
        "has a chunked head, which actions=('retain', 'recompute') with head='auto' excludes"
    )
