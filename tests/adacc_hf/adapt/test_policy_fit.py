"""PolicyFit: sizes at which no policy keeps to the budget, or no policy certainly does."""

from __future__ import annotations

import pytest
from run_builders import events, run_lengths

from adacc_hf import AdaccCallback, InfeasibleBudgetError
from adacc_hf.adapt.policy_choice import PolicyChoice
from adacc_hf.artifacts.size_model import SizeModel
from adacc_hf.price.resized_profile import resize_profile
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
    make_trainer, make_model, monkeypatch
):
    probe = AdaccCallback(actions=("retain", "recompute"), memory_budget=0.4)
    run_lengths(make_trainer, [15, 16, 16], [probe], model=make_model())
    budget = int(probe.policy.predicted_peak_bytes)
    for uncertainty, expected in ((0.0, []), (0.5, [5])):
        monkeypatch.setattr(SizeModel, "uncertainty", uncertainty)
        callback = AdaccCallback(actions=("retain", "recompute"), memory_budget=budget)
        run_lengths(make_trainer, [15, 16, 14, 16, 12, 12], [callback], model=make_model())
        found = [event for event in events(callback, "memory") if "is exact to 50% only" in event.get("reason", "")]
        assert [event["step"] for event in found] == expected


def test_batches_of_a_class_above_the_budget_share_policies(make_trainer, make_model, monkeypatch):
    """Between the least peaks at 27 and at 30 tokens, no policy fits the bounds of the class of 25 to 30 tokens."""
    monkeypatch.setattr(PolicyChoice, "solver_ms", 1e9)
    settings = {"actions": ("retain", "recompute"), "memory_budget": 0.4}
    probe = AdaccCallback(**settings)
    run_lengths(make_trainer, [20, 22, 24], [probe], model=make_model())

    def least_bytes(length):
        sizes = (("input_ids", (4, length)), ("labels", (4, length)))
        return least_policy(resize_profile(probe.profile, sizes)).predicted_peak_bytes

    budget = (3 * least_bytes(27) + least_bytes(30)) // 4
    callback = AdaccCallback(**settings | {"memory_budget": budget})
    run_lengths(make_trainer, [20, 22, *[24] * 6, 27, 26, 25, 27, 25], [callback], model=make_model())
    others = [event for event in events(callback, "policy") if event["step"] > 8]
    assert [event["reason"] for event in others] == ["for batches of input_ids 4x27, labels 4x27"]
    assert others[0]["peak_bytes"] <= budget
