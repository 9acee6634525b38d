"""Warnings before a micro-batch that is predicted to exceed the budget."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from run_builders import events, refuse_profiles_of, run_lengths

from adacc_hf import AdaccCallback, AdaccConfig
from adacc_hf.adapt.budget_warnings import BudgetWarnings
from adacc_hf.solve.solver import least_policy
from adacc_hf.torch_glue.batch_shapes import TensorShape

SHORT, LONG = ((TensorShape("input_ids", (4, length)),) for length in (32, 64))


def size_policy(shapes, peak, memory_budget=100_000, due=None):
    """Return a size policy with the predicted `peak`."""
    budget = memory_budget if isinstance(memory_budget, int) else None
    replanner = SimpleNamespace(
        profile=SimpleNamespace(plain_stored_bytes=10**6),
        policy=object(),
        config=AdaccConfig(),
        memory_budget=memory_budget,
        predicted_peak_bytes=lambda: peak,
        is_over_budget=lambda nbytes: budget is not None and nbytes > budget,
    )
    return SimpleNamespace(shapes=shapes, replanner=replanner, due=due)


@pytest.fixture
def notes():
    return []


@pytest.fixture
def warnings(notes):
    return BudgetWarnings(notes.append)


def test_each_size_above_the_budget_is_warned_of_once(warnings, notes, caplog):
    for shapes, peak in ((SHORT, 100_000), (LONG, 150_000), (LONG, 150_000), (SHORT, 90_000)):
        warnings.before(shapes, size_policy(shapes, peak))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "input_ids 4x64 is predicted to take 150000 bytes" in record.getMessage()
    assert "50.0% above memory_budget=100000" in record.getMessage()
    assert "set memory_budget=150000 or more" in record.getMessage()
    assert [note in record.getMessage() for note in notes] == [True]


def test_a_policy_whose_prices_rise_above_the_budget_is_warned_of(warnings, notes):
    policy = size_policy(SHORT, 90_000)
    warnings.before(SHORT, policy)
    policy.replanner.predicted_peak_bytes = lambda: 110_000
    warnings.before(SHORT, policy)  # neither prices nor policy have changed, so the peak is not computed again
    assert not notes
    policy.replanner.profile, policy.due = SimpleNamespace(plain_stored_bytes=10**6), 8
    warnings.before(SHORT, policy)
    assert "until the solver's result is applied after step 8" in notes[0]


def test_a_size_that_another_warning_names_is_not_warned_of_again(warnings, notes):
    warnings.add(LONG)
    warnings.before(LONG, size_policy(LONG, 150_000))
    warnings.before_untracked(LONG, LONG, SimpleNamespace(predicted_peak_bytes=150_000), size_policy(SHORT, 1))
    assert not notes


def test_plans_that_never_change_are_compared_with_the_budget_too(warnings, notes):
    reference = size_policy(SHORT, 50_000)
    for peak in (90_000, 120_000, 120_000):
        warnings.before_untracked(LONG, LONG, SimpleNamespace(predicted_peak_bytes=peak), reference)
    assert len(notes) == 1
    assert "20.0% above" in notes[0]


def test_a_fraction_of_the_activations_bounds_no_peak(warnings, notes):
    warnings.before(LONG, size_policy(LONG, 10**9, memory_budget=0.5))
    assert not notes


def test_a_size_above_the_budget_is_warned_of_before_it_runs_also_before_a_step_was_measured(
    make_trainer, make_model, caplog
):
    probe = AdaccCallback(actions=("retain", "recompute"), memory_budget=0.4)
    run_lengths(make_trainer, [15, 16, 16], [probe], model=make_model())
    budget = int(1.03 * least_policy(probe.profile, probe.config).predicted_peak_bytes)
    callback = AdaccCallback(actions=("retain", "recompute"), memory_budget=budget)
    # Step 2 comes before the first measured step, with a size at which no policy fits.
    run_lengths(make_trainer, [16, 32, 32, 16], [callback], model=make_model())
    found = [event for event in events(callback, "memory") if "is predicted to take" in event.get("reason", "")]
    assert [event["step"] for event in found] == [2]
    assert f"above memory_budget={budget}" in found[0]["reason"]
    assert "set memory_budget=" in found[0]["reason"]
    assert [r.levelname for r in caplog.records if "is predicted to take" in r.getMessage()] == ["WARNING"]


def test_a_batch_without_a_policy_is_warned_of_before_it_runs(make_trainer, late_policy, monkeypatch, caplog):
    refuse_profiles_of(32, monkeypatch)
    callback = AdaccCallback(actions=("retain", "recompute"), memory_budget="1GiB")
    run_lengths(make_trainer, [16] * 3 + [32, 16, 32], [callback])
    found = [event for event in events(callback, "memory") if "under torch's checkpoint" in event.get("reason", "")]
    assert [event["step"] for event in found] == [4]
    assert "no profile predicts batches of this size" in found[0]["reason"]
    assert [r.levelname for r in caplog.records if "of this size. It takes about" in r.getMessage()] == ["WARNING"]
