"""PolicyChoice: each size of batch gets a policy of its own, before its first micro-batch."""

from __future__ import annotations

import pytest
from run_builders import events, run_lengths
from transformers import TrainerCallback

from adacc_hf import AdaccCallback
from adacc_hf.adapt import extrapolated_policies, policy_cache
from adacc_hf.adapt.extrapolated_policies import ExtrapolatedPolicies
from adacc_hf.adapt.policy_choice import PolicyChoice
from adacc_hf.price.resized_profile import resize_profile
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.solve.solver import least_policy


def test_other_lengths_get_policies_of_their_own(make_trainer):
    """Each size's policy is set before its first batch, extrapolated from parts of the first batch."""
    callback = AdaccCallback(actions=("retain", "recompute"), memory_budget=0.6)
    lengths = [16] * 4 + [32] * 30 + [9, 16, 8, 32] * 10
    run_lengths(make_trainer, lengths, [callback])
    policy_events = events(callback, "policy")
    assert [(event["step"], event.get("reason")) for event in policy_events] == [
        (0, None),
        (5, "for batches of input_ids 4x40, labels 4x40"),
        (35, "for batches of input_ids 4x9, labels 4x9"),
        (37, "for batches of input_ids 4x8, labels 4x8"),
    ]
    stored_bytes = [event["stored_bytes"] for event in policy_events]
    assert stored_bytes[3] < stored_bytes[2] < stored_bytes[0] < stored_bytes[1]


@pytest.mark.parametrize(("solver_ms", "solved_at"), [(0.0, 8), (1e9, None)])
def test_a_size_borrows_a_policy_until_a_solver_run_pays(make_trainer, make_model, monkeypatch, solver_ms, solved_at):
    monkeypatch.setattr(ExtrapolatedPolicies, "solver_ms", solver_ms)
    monkeypatch.setattr(extrapolated_policies, "USED_UP", 1.0)  # most of this model's memory is weights at any size
    probe = AdaccCallback(actions=("retain", "recompute"), memory_budget=0.5)
    run_lengths(make_trainer, [32, 32, 32], [probe], model=make_model())
    # The longest batches recompute most, and 24 tokens do not fit without recomputation.
    least = least_policy(probe.profile, probe.config).predicted_peak_bytes
    shorter = resize_profile(probe.profile, (("input_ids", (4, 24)), ("labels", (4, 24))))
    plain = uniform_policy(shorter, "retain").predicted_peak_bytes
    assert least < plain
    budget = (2 * least + plain) // 3
    callback = AdaccCallback(actions=("retain", "recompute"), memory_budget=budget)
    run_lengths(make_trainer, [32] * 5 + [24, 32] * 5, [callback], model=make_model())
    borrowed, *later = events(callback, "policy")[1:]
    assert (borrowed["step"], [event["step"] for event in later]) == (6, [] if solved_at is None else [solved_at])
    if solved_at is None:
        return
    (solved,) = later
    assert solved["reason"] == f"{borrowed['reason']}, which have come 2 times"
    assert solved["overhead_ms"] < borrowed["overhead_ms"]
    assert callback.policy.predicted_overhead_ms == solved["overhead_ms"], "the run shows the policy that it follows"
    assert max(borrowed["peak_bytes"], solved["peak_bytes"]) <= budget


def test_a_longer_batch_is_recomputed_until_a_solver_run_pays(make_trainer, monkeypatch):
    """No policy of the shorter batches fits, and full recomputation takes no solver."""
    monkeypatch.setattr(ExtrapolatedPolicies, "solver_ms", 1e9)
    probe = AdaccCallback(actions=("retain", "recompute"), memory_budget=0.5)
    run_lengths(make_trainer, [32] * 3, [probe])
    peaks = [uniform_policy(probe.profile, action).predicted_peak_bytes for action in ("recompute", "retain")]
    budget = sum(peaks) // 2
    monkeypatch.setattr(extrapolated_policies, "USED_UP", 1.0)  # most of this model's memory is weights
    monkeypatch.setattr(extrapolated_policies, "solve_policy", None)
    callback = AdaccCallback(actions=("retain", "recompute"), memory_budget=budget)
    run_lengths(make_trainer, [16] * 4 + [32] * 3, [callback])
    longer = events(callback, "policy")[-1]
    assert longer["step"] == 5
    assert longer["peak_bytes"] <= budget


def test_lengths_that_differ_from_the_first_steps_on_are_never_without_a_policy(make_trainer, monkeypatch):
    is_unplanned = []
    original = PolicyChoice.choose

    def choose(choice, shapes, nbytes):
        original(choice, shapes, nbytes)
        is_unplanned.append(choice.current is None)

    monkeypatch.setattr(PolicyChoice, "choose", choose)
    callback = AdaccCallback(actions=("retain", "recompute"), memory_budget=0.6)
    run_lengths(make_trainer, [24, 20, 32, 17, 30, 9, 32, 25, 11], [callback])
    assert len(is_unplanned) == 9
    assert not any(is_unplanned)


def test_a_size_without_tracking_gets_other_plans_after_the_budget_was_tightened(make_trainer, monkeypatch):
    """Sizes beyond MAX_SIZE_POLICIES have plans that nothing adapts: they must not keep the budget of before."""
    monkeypatch.setattr(policy_cache, "MAX_SIZE_POLICIES", 1)
    probe = AdaccCallback(actions=("retain", "recompute"), memory_budget=0.6)
    run_lengths(make_trainer, [16] * 3, [probe])
    peaks = [uniform_policy(probe.profile, action).predicted_peak_bytes for action in ("recompute", "retain")]
    followed = []

    class Tighten(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            choice = callback.session.phase.choice
            followed.append((choice.current is None, choice.plans.policy.predicted_peak_bytes))
            if state.global_step == 6:
                choice.context.tightened = budget * 95 // 100

    budget = (2 * peaks[0] + peaks[1]) // 3
    callback = AdaccCallback(actions=("retain", "recompute"), memory_budget=budget)
    run_lengths(make_trainer, [16] * 4 + [15] * 5, [callback, Tighten()])
    assert [is_untracked for is_untracked, _ in followed] == [False] * 4 + [True] * 5
    assert max(peak for _, peak in followed[4:6]) <= budget
    assert max(peak for _, peak in followed[6:]) <= budget * 95 // 100 < followed[5][1]
