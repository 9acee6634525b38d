"""PeakCheck: predictions that were too low."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from run_builders import events

from adacc_hf import AdaccCallback, AdaccConfig
from adacc_hf.adapt.peak_check import PeakCheck
from adacc_hf.price.live_step import LiveStep
from adacc_hf.solve.simple_policies import uniform_policy


@pytest.mark.parametrize("missed_bytes", [2**18, 2**14], ids=["much", "within-the-tolerance"])
def test_the_measured_peak_corrects_a_prediction_that_was_too_low(make_trainer, monkeypatch, late_policy, missed_bytes):
    """The profile is falsified by `missed` bytes in every phase of the step."""
    from adacc_hf.adapt.corrections import with_static_memory

    original = LiveStep.profile
    probe = AdaccCallback(actions=("retain", "recompute"), memory_budget=0.7)
    make_trainer([probe], max_steps=6).train()
    honest = events(probe, "memory")[0]
    assert not honest["corrected"]
    assert honest["measured_peak_bytes"] == pytest.approx(honest["peak_bytes"], rel=0.01)
    monkeypatch.setattr(LiveStep, "profile", lambda *a, **k: with_static_memory(original(*a, **k), -missed_bytes))
    budget = honest["peak_bytes"] - missed_bytes
    callback = AdaccCallback(actions=("retain", "recompute"), memory_budget=budget)
    make_trainer([callback], max_steps=8).train()
    memory = events(callback, "memory")
    assert memory[0]["corrected"]
    assert memory[0]["measured_peak_bytes"] - memory[0]["peak_bytes"] == pytest.approx(missed_bytes, rel=0.2)
    (change, *_) = events(callback, "change")
    assert "bytes more than predicted" in change["reason"]
    # A normal step under the new policy keeps to the budget, as predicted.
    assert memory[-1]["step"] > change["step"]
    assert memory[-1]["measured_peak_bytes"] <= budget
    assert memory[-1]["measured_peak_bytes"] == pytest.approx(change["peak_bytes"], rel=0.01)


def test_a_step_whose_largest_micro_batch_ran_other_operators_is_compared_with_its_record(gpt2_like_profile):
    """A micro-batch of one long sample may need most memory, and one of several samples may be the largest."""
    own, same = gpt2_like_profile(), gpt2_like_profile()
    other = replace(own, kinds=tuple(replace(kind, digest="another-kind") for kind in own.kinds))
    record = SimpleNamespace(policy=uniform_policy(own, "recompute"), profile=own, shapes=())
    for largest, expected in ((other, own), (same, same)):
        fit = SimpleNamespace(class_of=lambda _: (), corrected=lambda _, profile=largest: profile)
        check = SimpleNamespace(
            _choice=SimpleNamespace(fit=fit, largest=()), _run=SimpleNamespace(config=AdaccConfig())
        )
        assert PeakCheck._step_profile(check, record) is expected
