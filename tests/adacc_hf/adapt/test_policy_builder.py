"""PolicyBuilder: the first policy within a device's memory, and budgets that a user's policy exceeds."""

from __future__ import annotations

import pytest

from adacc_hf import AdaccCallback, AdaccConfig
from adacc_hf.adapt.policy_builder import refuse_above_budget
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.solve.solver import solve_policy

QUIET = {"tracking": "off", "guard": False, "min_compress_bytes": 0}


BATCH_SIZE = 16


BATCH_BYTES = 2 * BATCH_SIZE * 32 * 8
"""Bytes of the token numbers and labels of one micro-batch."""


@pytest.fixture
def device_with(monkeypatch):
    """Return `device_with(nbytes)`, which sets the bytes of device memory that this process may use."""

    def set_memory(nbytes: int) -> None:
        monkeypatch.setattr("adacc_hf.price.measurement.available_bytes", lambda device, static_bytes: nbytes)

    return set_memory


def test_what_fits_the_device_is_trained_as_it_is(train, device_with, heads_take):
    device_with(1 << 40)
    heads_take(plain=1.0, chunked=1.0)
    callback = AdaccCallback(memory_budget="auto", **QUIET)
    run = train([callback])
    assert callback.policy.is_plain
    run.assert_equals(train())


def test_what_does_not_fit_keeps_to_the_device_less_the_margin(
    make_trainer, make_model, measure_step_peak, device_with
):
    settings = {"per_device_train_batch_size": BATCH_SIZE, "max_steps": 3}
    device_with(1 << 40)
    plain, adacc = (AdaccCallback(memory_budget="auto", **QUIET) for _ in range(2))
    make_trainer([plain], model=make_model(), **settings).train()
    peaks = [uniform_policy(plain.profile, action).predicted_peak_bytes for action in ("retain", "recompute")]
    budget_bytes = sum(peaks) // 2
    device_with(int(budget_bytes / (1 - AdaccConfig().memory_margin)) + 1)
    peak_meter = measure_step_peak(5)
    make_trainer([adacc, peak_meter], model=make_model(), **{**settings, "max_steps": 5}).train()
    assert dict(adacc.policy.facts)["budget_bytes"] == budget_bytes
    assert not adacc.policy.is_plain
    assert peak_meter.peak_bytes + 2 * BATCH_BYTES <= budget_bytes


@pytest.fixture
def profile(gpt2_like_profile):
    return gpt2_like_profile()


@pytest.fixture
def policy(profile):
    return solve_policy(profile, 0.5, AdaccConfig())


def test_a_budget_that_a_users_policy_keeps_to_is_accepted(policy, profile):
    stored, peak, plain_bytes = policy.predicted_stored_bytes, policy.predicted_peak_bytes, profile.plain_stored_bytes
    for budget in ("auto", peak, f"{peak}B", 0.5, stored / plain_bytes):
        refuse_above_budget(policy, budget, plain_bytes)
        refuse_above_budget(policy, budget)


def test_a_budget_that_a_users_policy_exceeds_is_refused_with_both_sizes(policy, profile):
    stored, peak, plain_bytes = policy.predicted_stored_bytes, policy.predicted_peak_bytes, profile.plain_stored_bytes
    with pytest.raises(ValueError, match=f"memory_budget={peak - 1} allows .* has a peak of {format_bytes(peak)}"):
        refuse_above_budget(policy, peak - 1, plain_bytes)
    fraction = 0.99 * stored / plain_bytes
    for known_bytes in (plain_bytes, None):
        with pytest.raises(ValueError, match=f"allows .*, and the policy .* stores {format_bytes(stored)}: leave one"):
            refuse_above_budget(policy, fraction, known_bytes)


def test_a_fraction_of_what_nobody_knows_is_not_judged(profile):
    policy = uniform_policy(profile, "retain")
    assert "memory_budget" not in dict(policy.facts)
    refuse_above_budget(policy, 0.01)
    with pytest.raises(ValueError, match="stores"):
        refuse_above_budget(policy, 0.01, profile.plain_stored_bytes)
