"""Figures of a policy in the training's log."""

from types import SimpleNamespace

import pytest

from adacc_hf.adapt.metrics import metrics
from adacc_hf.solve.simple_policies import uniform_policy


@pytest.fixture
def profile(gpt2_like_profile):
    return gpt2_like_profile()


@pytest.fixture
def policy(profile):
    return uniform_policy(profile, "recompute")


def controller_of(has_work, **figures):
    replanner = SimpleNamespace(has_work=lambda: has_work)
    shown = {"measured_peak_bytes": None, "error": None, "gradient_error": None, **figures}
    return SimpleNamespace(shown=SimpleNamespace(replanner=replanner, **shown), context=SimpleNamespace(extra_ms=2.5))


def test_a_policy_without_a_profile_has_its_predictions(policy):
    assert metrics(policy, None, None, None) == {
        "adacc/stored_gib": policy.predicted_stored_bytes / 2**30,
        "adacc/peak_gib": policy.predicted_peak_bytes / 2**30,
        "adacc/overhead_ms": policy.predicted_overhead_ms,
    }


def test_the_measured_overhead_comes_before_the_predicted_one_even_if_it_is_zero(policy):
    assert policy.predicted_overhead_ms > 0
    assert metrics(policy, None, None, 0.0)["adacc/overhead_ms"] == 0.0


def test_the_rate_is_that_of_plain_training_s_bytes(policy, profile):
    rate = policy.predicted_stored_bytes / profile.plain_stored_bytes
    assert 0 < rate < 1
    assert metrics(policy, profile, None, None)["adacc/compression_rate"] == rate


def test_errors_are_zero_where_nothing_is_compressed_with_loss(policy, profile):
    figures = metrics(policy, profile, controller_of(False, error=0.3, measured_peak_bytes=2**29), None)
    assert (figures["adacc/error"], figures["adacc/gradient_error"]) == (0.0, 0.0)
    assert figures["adacc/measured_peak_gib"] == 0.5
    assert figures["adacc/tracking_ms"] == 2.5


def test_figures_that_are_not_measured_yet_are_left_out(policy, profile):
    figures = metrics(policy, profile, controller_of(True, gradient_error=0.25), None)
    assert figures["adacc/gradient_error"] == 0.25
    assert not {"adacc/error", "adacc/measured_peak_gib"} & figures.keys()
