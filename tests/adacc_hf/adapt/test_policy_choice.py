"""PolicyChoice: each size of batch gets a policy of its own, before its first micro-batch."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from run_builders import events, run_lengths
from transformers import TrainerCallback

from adacc_hf import AdaccCallback, AdaccConfig
from adacc_hf.adapt import policy_choice, policy_fit
from adacc_hf.adapt.policy_choice import PolicyChoice, SizePolicy
from adacc_hf.price.codec_selection import resize_profile
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.solve.solver import least_policy


def test_other_lengths_get_policies_of_their_own(make_trainer):
    """Three sizes are recorded. From then on, the policy of each size is set before its first batch."""
    callback = AdaccCallback(actions=("retain", "recompute"), memory_budget=0.6)
    run_lengths(make_trainer, [14, 15, 16, 16, 32, 32, 9, 16, 8, 32], [callback])
    policy_events = events(callback, "policy")
    set_at = ((2, 15), (3, 16), (5, 40), (7, 9), (9, 8))
    expected = [(1, None), *((step, f"for batches of input_ids 4x{n}, labels 4x{n}") for step, n in set_at)]
    assert [(event["step"], event.get("reason")) for event in policy_events] == expected
    first, _, _, longest, shorter, shortest = (event["stored_bytes"] for event in policy_events)
    assert shortest < shorter < first < longest


@pytest.mark.parametrize(("solver_ms", "solved_at"), [pytest.param(0.0, 10, marks=pytest.mark.gate), (1e9, None)])
def test_a_size_borrows_a_policy_until_a_solver_run_pays(make_trainer, make_model, monkeypatch, solver_ms, solved_at):
    monkeypatch.setattr(policy_choice, "SOLVER_MS", solver_ms)
    monkeypatch.setattr(policy_fit, "USED_UP", 1.0)  # most of this model's memory is weights at any size
    probe = AdaccCallback(actions=("retain", "recompute"), memory_budget=0.5)
    run_lengths(make_trainer, [30, 31, 32], [probe], model=make_model())
    # The longest batches recompute most, and the class of 24 tokens does not fit without recomputation.
    least = least_policy(probe.profile, probe.config).predicted_peak_bytes
    shorter = resize_profile(probe.profile, (("input_ids", (4, 26)), ("labels", (4, 26))))
    plain = uniform_policy(shorter, "retain").predicted_peak_bytes
    assert least < plain
    budget = (2 * least + plain) // 3
    callback = AdaccCallback(actions=("retain", "recompute"), memory_budget=budget)
    run_lengths(make_trainer, [30, 31, *[32] * 5, *[24, 32] * 5, 24], [callback], model=make_model())
    borrowed, *later = [event for event in events(callback, "policy") if event["step"] > 3]
    assert (borrowed["step"], [event["step"] for event in later]) == (8, [] if solved_at is None else [solved_at])
    if solved_at is None:
        return
    (solved,) = later
    assert solved["reason"] == f"{borrowed['reason']}, which have come 2 times"
    assert solved["overhead_ms"] < borrowed["overhead_ms"]
    assert callback.policy.predicted_overhead_ms == solved["overhead_ms"], "the run shows the policy that it follows"
    assert max(borrowed["peak_bytes"], solved["peak_bytes"]) <= budget


def test_a_longer_batch_is_recomputed_until_a_solver_run_pays(make_trainer, monkeypatch):
    """No policy of the shorter batches fits, and full recomputation takes no solver."""
    monkeypatch.setattr(policy_choice, "SOLVER_MS", 1e9)
    probe = AdaccCallback(actions=("retain", "recompute"), memory_budget=0.5)
    run_lengths(make_trainer, [28, 30, 32], [probe])
    peaks = [uniform_policy(probe.profile, action).predicted_peak_bytes for action in ("recompute", "retain")]
    budget = sum(peaks) // 2
    monkeypatch.setattr(policy_fit, "USED_UP", 1.0)  # most of this model's memory is weights
    callback = AdaccCallback(actions=("retain", "recompute"), memory_budget=budget)

    class NoSolver(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 4:
                monkeypatch.setattr(policy_fit, "solve_policy", None)

    run_lengths(make_trainer, [14, 15, 16, 16, 32, 32, 32], [callback, NoSolver()])
    longer = events(callback, "policy")[-1]
    assert longer["step"] == 5
    assert longer["peak_bytes"] <= budget


def test_lengths_that_differ_from_the_first_steps_on_are_never_without_a_policy(make_trainer, monkeypatch):
    """Sizes that no profile predicts are recorded, three in all."""
    is_unplanned, num_profiles = [], []
    original = PolicyChoice.read

    def read(choice, inputs):
        original(choice, inputs)
        is_unplanned.append(choice.current is None and not choice.is_unpredicted)
        num_profiles.append(choice.num_profiles)

    monkeypatch.setattr(PolicyChoice, "read", read)
    callback = AdaccCallback(actions=("retain", "recompute"), memory_budget=0.6)
    run_lengths(make_trainer, [24, 20, 32, 17, 30, 9, 32, 25, 11], [callback])
    assert not any(is_unplanned)
    assert num_profiles[-1] == 3


def test_a_run_forgets_the_sizes_that_it_used_least_recently(make_trainer, monkeypatch):
    monkeypatch.setattr(policy_choice, "MAX_SIZES", 3)
    remembered = []

    class Note(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            remembered.append([record.shapes[0][1][1] for record in callback.session.phase.choice.records.values()])

    callback = AdaccCallback(actions=("retain", "recompute"), memory_budget=0.6)
    run_lengths(make_trainer, [24, 20, 32, 16, 32, 12, 24], [callback, Note()])
    assert max(map(len, remembered)) == 3
    assert remembered[-1][-1] >= 24 > remembered[-1][-2] >= 12


def test_a_batch_without_a_policy_is_warned_of_before_it_runs(make_trainer, late_policy, monkeypatch, caplog):
    monkeypatch.setattr(policy_choice, "MOST_PROFILES", 1)
    callback = AdaccCallback(actions=("retain", "recompute"), memory_budget="1GiB")
    run_lengths(make_trainer, [16] * 3 + [32, 16, 32], [callback])
    found = [event for event in events(callback, "memory") if "under torch's checkpoint" in event.get("reason", "")]
    assert [event["step"] for event in found] == [4]
    assert "no profile predicts batches of input_ids 4x32, labels 4x32, and may take more" in found[0]["reason"]
    assert [r.levelname for r in caplog.records if "and may take more than" in r.getMessage()] == ["WARNING"]


@pytest.mark.parametrize(("num_diverged", "is_most"), [(2, False), (3, True)])
def test_most_of_four_batches_diverged_if_three_ran_other_operators(gpt2_like_profile, num_diverged, is_most):
    profile, shapes = gpt2_like_profile(num_blocks=2), (("input_ids", (4, 32)),)
    policy = uniform_policy(profile, "recompute")
    budget = SimpleNamespace(limits_peak=False)
    choice = PolicyChoice(None, SimpleNamespace(config=AdaccConfig(), budget=lambda _: budget))
    choice.current, choice.shapes = (
        SizePolicy(shapes, profile, profile, policy, plans=None, version=0, must_measure=False),
        shapes,
    )
    for number in range(4):
        choice.end_micro_batch({"other operators": Counter(h0=1, h1=1)} if number < num_diverged else {})
    assert choice.most_diverged() == is_most
    assert not choice.most_diverged(), "batches count from the last call on"
