"""ProfileRequests: later batches that a run profiles, or cannot profile."""

from __future__ import annotations

from run_builders import events, refuse_profiles_of, run_lengths

from adacc_hf import AdaccCallback


def test_a_size_that_cannot_be_profiled_for_want_of_memory_stays_without_a_policy(
    make_trainer, monkeypatch, late_policy
):
    refuse_profiles_of(32, monkeypatch)
    callback = AdaccCallback(actions=("retain", "recompute"), memory_budget=0.6)
    trainer = run_lengths(make_trainer, [16] * 4 + [32] * 16, [callback])
    assert trainer.state.global_step == 20
    (memory,) = [event for event in events(callback, "memory") if "reason" in event]
    assert memory["reason"] == "input_ids 4x32, labels 4x32: there is no memory to profile them in"
    assert len(events(callback, "policy")) == 1
