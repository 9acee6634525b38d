"""ExtrapolatedPolicies: sizes at which no policy keeps to the budget, or no policy certainly does."""

from __future__ import annotations

import pytest
from run_builders import events, run_lengths

from adacc_hf import AdaccCallback, InfeasibleBudgetError
from adacc_hf.artifacts.size_model import SizeModel
from adacc_hf.solve.solver import least_policy


@pytest.mark.parametrize("reaction", ["warn", "error"])
def test_a_size_at_which_nothing_keeps_to_the_budget_is_said_before_it_runs(make_trainer, make_model, caplog, reaction):
    probe = AdaccCallback(actions=("retain", "recompute"), memory_budget=0.4)
    run_lengths(make_trainer, [15, 16, 16], [probe], model=make_model())
    # The budget is slightly above the least peak: length 16 keeps to it, and length 20 of the next size class needs 8 %
    # more.
    budget = int(1.03 * least_policy(probe.profile, probe.config).predicted_peak_bytes)
    callback = AdaccCallback(actions=("retain", "recompute"), memory_budget=budget, on_over_budget=reaction)
    lengths = [15, 16, 16, 32, 32, 16]
    if reaction == "error":
        with pytest.raises(
            InfeasibleBudgetError, match=r"batches of input_ids 4x32, labels 4x32 need \d+ bytes at least"
        ):
            run_lengths(make_trainer, lengths, [callback], model=make_model())
        return
    run_lengths(make_trainer, lengths, [callback], model=make_model())
    memory_events = [event for event in events(callback, "memory") if " bytes at least" in event.get("reason", "")]
    assert [event["step"] for event in memory_events] == [4]
    assert memory_events[0]["reason"].startswith("batches of input_ids 4x32, labels 4x32 need ")
    assert ", batches of input_ids 4x16, labels 4x16 would fit the budget" in memory_events[0]["reason"]
    assert len([message for message in caplog.messages if "with the least memory" in message]) == 1


def test_a_size_of_which_too_little_is_known_is_said_where_the_budget_has_no_room_for_that(
    make_trainer, make_model, monkeypatch, late_policy
):
    probe = AdaccCallback(actions=("retain", "recompute"), memory_budget=0.4)
    run_lengths(make_trainer, [15, 16, 16], [probe], model=make_model())
    budget = int(probe.policy.predicted_peak_bytes)
    for uncertainty, expected in ((0.0, []), (0.5, [4])):
        monkeypatch.setattr(SizeModel, "uncertainty", uncertainty)
        callback = AdaccCallback(actions=("retain", "recompute"), memory_budget=budget)
        run_lengths(make_trainer, [15, 16, 16, 13, 13, 16], [callback], model=make_model())
        memory_events = [
            event for event in events(callback, "memory") if "may take more than" in event.get("reason", "")
        ]
        assert [event["step"] for event in memory_events] == expected
        assert all("is exact to 50% only" in event["reason"] for event in memory_events)
