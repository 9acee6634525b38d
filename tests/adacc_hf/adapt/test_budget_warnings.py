"""Warnings before a micro-batch that is predicted to exceed the budget."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from run_builders import events, run_lengths

from adacc_hf import AdaccCallback, AdaccConfig
from adacc_hf.adapt import policy_choice
from adacc_hf.adapt.budget_warnings import BudgetWarnings
from adacc_hf.adapt.fallback_stats import full_recomputation
from adacc_hf.adapt.size_policy import SizePolicy
from adacc_hf.artifacts.config import Budget
from adacc_hf.solve.simple_policies import uniform_policy

SHORT, LONG = ((("input_ids", (4, length)),) for length in (32, 64))


def record(shapes, peak):
    """Return a size policy with the predicted `peak`."""
    return SimpleNamespace(shapes=shapes, policy=SimpleNamespace(predicted_peak_bytes=peak))


def budget_of(setting):
    return Budget.resolve(setting, SimpleNamespace(plain_stored_bytes=10**6), AdaccConfig())


@pytest.fixture
def notes():
    return []


@pytest.fixture
def warnings(notes):
    return BudgetWarnings(notes.append)


def test_each_size_above_the_budget_is_warned_of_once(warnings, notes, caplog):
    for shapes, peak in ((SHORT, 100_000), (LONG, 150_000), (LONG, 150_000), (SHORT, 90_000)):
        warnings.before(shapes, record(shapes, peak), None, budget_of(100_000))
    (logged,) = caplog.records
    assert logged.levelno == logging.WARNING
    assert "input_ids 4x64 is predicted to take 150000 bytes" in logged.getMessage()
    assert "50.0% above memory_budget=100000" in logged.getMessage()
    assert "set memory_budget=150000 or more" in logged.getMessage()
    assert [note in logged.getMessage() for note in notes] == [True]


def test_a_policy_whose_peak_rises_above_the_budget_is_warned_of(warnings, notes):
    policy = record(SHORT, 90_000)
    warnings.before(SHORT, policy, None, budget_of(100_000))
    assert not notes
    policy.policy.predicted_peak_bytes = 110_000
    warnings.before(SHORT, policy, None, budget_of(100_000))
    assert len(notes) == 1


def test_a_size_that_another_warning_names_is_not_warned_of_again(warnings, notes):
    warnings.add(LONG)
    warnings.before(LONG, record(LONG, 150_000), None, budget_of(100_000))
    assert not notes


def test_a_fraction_of_the_activations_bounds_no_peak(warnings, notes):
    warnings.before(LONG, record(LONG, 10**9), None, budget_of(0.5))
    assert not notes


@pytest.fixture
def measured(gpt2_like_profile):
    """Return the record of a profiled size under the policy that retains everything."""
    profile = gpt2_like_profile()
    return SizePolicy((("input_ids", (8, 1024)),), profile, profile, uniform_policy(profile, "retain"), None, 0)


def test_a_batch_that_left_its_policy_is_warned_of_if_it_may_exceed_the_budget(warnings, notes, measured):
    least = full_recomputation(measured.profile).predicted_peak_bytes
    for excess, ran_planned in ((0, False), (0, True), (0, True), (1000, False), (1000, True)):
        budget = Budget.resolve(least - excess, measured.profile, AdaccConfig())
        warnings.after(measured.shapes, measured, budget, ran_planned)
    assert ["may take more" in note for note in notes] == [True, False]
    assert "input_ids 8x1024 did not follow a policy, and takes up to about 1000 bytes more" in notes[1]


def test_a_batch_without_a_policy_is_warned_of_before_it_runs(make_trainer, late_policy, monkeypatch, caplog):
    monkeypatch.setattr(policy_choice, "MOST_PROFILES", 1)
    callback = AdaccCallback(actions=("retain", "recompute"), memory_budget="1GiB")
    run_lengths(make_trainer, [16] * 3 + [32, 16, 32], [callback])
    found = [event for event in events(callback, "memory") if "under torch's checkpoint" in event.get("reason", "")]
    assert [event["step"] for event in found] == [4]
    assert "no profile predicts batches of this size" in found[0]["reason"]
    assert [r.levelname for r in caplog.records if "of this size. It takes about" in r.getMessage()] == ["WARNING"]
